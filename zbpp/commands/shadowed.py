"""Refuses a file in the current folder that hides a library: Python looks there first for user classes."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from zbpp.launch import Refusal

LIBRARIES = (
    "torch", "numpy", "hydra", "omegaconf", "rich", "matplotlib", "yaml", "transformers", "tokenizers",
    "safetensors", "datasets", "peft", "optimi", "tensorboard", "wandb",
)  # fmt: skip
"""What zbpp imports, by the names of the packages."""


def check_no_library_is_hidden(folder: Path) -> None:
    """Raise Refusal if `folder` has a torch.py, say, and torch is installed elsewhere."""
    elsewhere = [path for path in sys.path if Path(path or ".").resolve() != folder.resolve()]
    for name in LIBRARIES:
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.exists() and PathFinder.find_spec(name, elsewhere) is not None:
                raise Refusal(
                    f"{file.relative_to(folder)} in the current folder hides the library {name}, which zbpp "
                    "needs: give it another name, or start zbpp in another folder"
                )

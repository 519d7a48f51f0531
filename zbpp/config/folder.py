"""Where the YAML files of the choices are."""

from __future__ import annotations

from pathlib import Path


def config_folder() -> Path:
    """configs/ of the repository if there is one, else the copy inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    in_repository = package.parent / "configs"
    return in_repository if (in_repository / "train.yaml").is_file() else package / "configs"

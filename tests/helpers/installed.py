"""zbpp as `pip install` of its wheel makes it, in a folder of its own, and running it from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]


def install(folder: Path) -> Path:
    """Build the wheel and install it into `folder`/site; its requirements are the running environment's."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (wheel,) = folder.glob("*.whl")
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site"), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True, timeout=100)
    return folder / "site"


def start(folder: Path, command: list[str], site: Path, **variables: str) -> SimpleNamespace:
    """Run in `folder`, as a user would who has no account anywhere; stdout and stderr in one text.

    site: where zbpp is imported from. The folder's own files are found, the repository's are not.
    """
    foreign = ("WANDB_", "TORCHELASTIC", "MASTER_")
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(foreign) and name not in ranks
    }
    private = {f"WANDB_{name}_DIR": str(folder / "private") for name in ("CACHE", "CONFIG", "DATA")}
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(site), "NETRC": str(folder / "none")}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**clean, **own, **private, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return SimpleNamespace(rc=done.returncode, text=done.stdout)

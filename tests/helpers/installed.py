"""zbpp as `pip install` of its wheel makes it, in an environment that can't import the repository."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Installation(NamedTuple):
    """Where zbpp is installed. pythonpath: for an environment that lacks hatchling, the repository."""

    python: Path
    pythonpath: str = ""

    def zbpp(self, *arguments: str) -> list[str]:
        """The command line of `zbpp ...`."""
        return [str(self.python), "-m", "zbpp", *arguments]

    def torchrun(self, *arguments: str) -> list[str]:
        """The command line of torchrun with two ranks."""
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [str(self.python), *launch, *arguments]

    def start(self, folder: Path, command: list[str], **variables: str) -> SimpleNamespace:
        """Run in `folder`, as a user would who has no account anywhere; stdout and stderr in one text."""
        foreign = ("WANDB_", "TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "PYTHONPATH")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        private = {f"WANDB_{name}_DIR": str(folder / "private") for name in ("CACHE", "CONFIG", "DATA")}
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": self.pythonpath, "NETRC": str(folder / "none")}
        done = subprocess.run(
            command,
            cwd=folder,
            env={**clean, **own, **private, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )
        return SimpleNamespace(rc=done.returncode, text=done.stdout)


def install_once(folder: Path) -> Installation:
    """`install`, by the first of several processes that ask."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            install(folder)
            (folder / "done").touch()
    return Installation(_python_in(folder))


def install(folder: Path) -> Installation:
    """Build the wheel and install it into a new environment, which shares the running one's requirements.

    The running environment's folders of packages are on the path of the new one. Their .pth files are not
    read there, so an editable zbpp is not found.
    """
    python = _python_in(folder)
    _run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    (wheel,) = folder.glob("*.whl")
    _run("-m", "venv", "--without-pip", str(folder / "venv"))
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "requirements.pth").write_text("\n".join(shared))
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--ignore-installed"]
    _run("-m", "pip", "--python", str(python), "install", *options, str(wheel))
    return Installation(python)


def _python_in(folder: Path) -> Path:
    return folder / "venv/bin/python"


def _run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr

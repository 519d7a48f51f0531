"""The code that README and docs show."""

import atexit
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

from helpers.warm import WarmPython

ROOT = Path(__file__).parent.parent.parent


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page that are marked with this language, in order. page: "docs/split.md"."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), flags=re.M | re.S)
    return [text for marked, text in found if marked == language]


@functools.cache
def _warm() -> WarmPython:
    made = WarmPython(Path(sys.executable), os.environ.get("PYTHONPATH", ""))
    atexit.register(made.close)
    return made


def run_command(command: str, folder: Path) -> str:
    """Run a shell command in `folder` as a user does; returns what it prints. Fails if the command fails.

    Its `zbpp`, `torchrun` and `python` are warm ones: see helpers.warm.
    """
    path = os.pathsep.join([str(_warm().bin), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "ZBPP": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout

"""What a process needs in its environment to have the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerator import build
from helpers.compiler import missing

TESTS = Path(__file__).parent.parent
NCCL_LIKE = {"cuda": "nccl", "npu": "hccl"}
"""{name of the device: the backend with NCCL's rules}."""


def environment(device: str) -> dict[str, str]:
    """Variables with which a new Python has the device "cuda" or "npu". Skips the test without a compiler."""
    if reason := missing(build.ACCELERATOR):
        pytest.skip(reason)
    paths = [TESTS / "accelerator" / "site", TESTS, TESTS.parent, os.environ.get("PYTHONPATH", "")]
    return {
        "ZBPP_TEST_DEVICE": device,
        "ZBPP_TEST_LIBRARY": str(build.library()),
        "PYTHONPATH": os.pathsep.join(str(each) for each in paths if str(each)),
    }


def run_with(device: str, command: str, folder: Path) -> str:
    """Run a shell command in `folder`, in which each Python has the device; returns what it prints.

    Fails if the command fails. Skips the test without a compiler.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {**os.environ, **environment(device), "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout

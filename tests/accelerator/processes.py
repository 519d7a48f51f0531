"""What a process needs in its environment to have the device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accelerator import build

TESTS = Path(__file__).parent.parent
NCCL_LIKE = {"cuda": "nccl", "npu": "hccl"}
"""{name of the device: the backend with NCCL's rules}."""


def environment(device: str) -> dict[str, str]:
    """Variables with which a new Python has the device "cuda" or "npu". Skips the test without a compiler."""
    if reason := build.missing():
        pytest.skip(reason)
    paths = [TESTS / "accelerator" / "site", TESTS, TESTS.parent, os.environ.get("PYTHONPATH", "")]
    return {
        "ZBPP_TEST_DEVICE": device,
        "ZBPP_TEST_LIBRARY": str(build.library()),
        "PYTHONPATH": os.pathsep.join(str(each) for each in paths if str(each)),
    }

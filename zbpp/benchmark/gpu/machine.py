"""What the check ran on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any

import numpy
import torch

from zbpp import __version__
from zbpp.benchmark.split.report import machine as of_split


def machine(device: str) -> dict[str, Any]:
    """Names and versions, and for a GPU what decides its speed."""
    found = {**of_split(device), "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
    found |= {"zbpp": __version__, "numpy": numpy.__version__, "kernel": platform.release()}
    if device == "cuda":
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "cuda": torch.version.cuda,
            "capability": f"{facts.major}.{facts.minor}",
            "memory_gib": round(facts.total_memory / 2**30, 1),
            "multiprocessors": facts.multi_processor_count,
            "num_gpus": torch.cuda.device_count(),
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        }
    return found


def name_of(device: str) -> str:
    """A name for files: letters, digits and `_`."""
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return "_".join("".join(each if each.isalnum() else " " for each in name.lower()).split())

"""Numbers about speed: model-FLOPs utilisation (a share of the device's peak), and which device it was."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import torch

# Dense TFLOP/s in bf16 and fp16 of one device, from the makers' data sheets.
_PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's peak in FLOP/s; None if it is not known (every CPU, every dtype wider than 16 bits)."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((tera * 1e12 for key, tera in _PEAK_TFLOPS.items() if key in name), None)


def model_flops_utilisation(
    num_parameters: int, tokens_per_second: float | None, num_ranks: int, peak: float | None
) -> float | None:
    """Model-FLOPs utilisation by the usual 6 FLOPs per parameter and token; attention is not counted.

    peak: FLOP/s of one device. None if the peak is not known, or if the data are no tokens.
    """
    if peak is None or tokens_per_second is None:
        return None
    return 6 * num_parameters * tokens_per_second / (num_ranks * peak)


def machine(device: torch.device) -> dict[str, Any]:
    """What figures were measured on: device, versions of torch and Python."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def median(numbers: Sequence[float]) -> float:
    """The middle number; of an even count the larger of the two in the middle."""
    return sorted(numbers)[len(numbers) // 2]

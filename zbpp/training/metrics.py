"""Numbers about speed: model FLOPs and what share of the device's peak they are."""

from __future__ import annotations

import torch

# Dense bf16 TFLOP/s of one device, from the makers' data sheets.
_PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s at best, None where it is not known (every CPU, and other dtypes than bf16)."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((tera * 1e12 for key, tera in _PEAK_TFLOPS.items() if key in name), None)


def utilisation(
    num_parameters: int, tokens_per_second: float | None, num_ranks: int, peak: float | None
) -> float | None:
    """Model-FLOPs utilisation by the usual 6 FLOPs per parameter and token; attention is not counted.

    None where the peak is not known, or there are no tokens.
    """
    if peak is None or tokens_per_second is None:
        return None
    return 6 * num_parameters * tokens_per_second / (num_ranks * peak)

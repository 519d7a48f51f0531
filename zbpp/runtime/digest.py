"""A digest of a tensor's bits, to compare copies on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from zbpp.runtime.processes.dtensors import local_of

_CHUNK = 2**22  # words at a time: bounds the memory that a digest takes
_ODD = 0x9E3779B97F4A7C15 - 2**64  # its bits look random: those of the golden ratio


def digest(tensor: Tensor) -> Tensor:
    """An int64 scalar on the tensor's device; it depends on all bits of the local part and on their places.

    The sum of the words, each times an odd number of its own. The sum is exact, in whatever order a device
    adds, and a change of one word always changes it. Nothing here waits for the device.
    """
    plain = local_of(tensor.detach()).resolve_conj().resolve_neg().contiguous().view(-1)
    words = plain.view({1: torch.int8, 2: torch.int16}.get(plain.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):
        weights = torch.arange(len(chunk), device=words.device).mul_(_ODD).bitwise_or_(1)
        total = total * _ODD + weights.mul_(chunk).sum()
    return total

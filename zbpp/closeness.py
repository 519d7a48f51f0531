"""Whether tensors are equal up to rounding: the largest difference, relative to the largest value."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def largest(tensors: Iterable[Tensor | None]) -> float:
    """The largest absolute value in all tensors; NaN and infinities count as 0, and so does None."""
    numbers = [each for each in tensors if each is not None and each.numel() and each.dtype != torch.bool]
    return max((float(each.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) for each in numbers), default=0.0)


def is_close(found: Tensor, expected: Tensor, relative: float, *, least: float = 0.0) -> bool:
    """Whether the shapes are equal, and the values up to `relative` of the largest expected one.

    least: counts as the largest value of a tensor whose values are smaller. NaN is equal to NaN.
    """
    if found.shape != expected.shape:
        return False
    scale = relative * max(largest([expected]), least)
    one, other = (each.detach().double() if each.is_floating_point() else each for each in (found, expected))
    return torch.allclose(one, other, rtol=0, atol=scale, equal_nan=True)

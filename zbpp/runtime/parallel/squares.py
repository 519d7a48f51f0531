"""The squared norm of a gradient, in float64. The norm over all ranks is the root of the sum of these."""

from __future__ import annotations

import torch
from torch import Tensor

from zbpp.runtime.parallel.mesh import local_of


def square_of(gradient: Tensor) -> Tensor:
    """The sum of squares of this process's part of a gradient, a scalar on its device."""
    values = _values(gradient)
    real = torch.view_as_real(values) if values.is_complex() else values
    return torch.linalg.vector_norm(real, dtype=torch.float64).square()


def _values(gradient: Tensor) -> Tensor:
    """This process's part of a gradient; for a sparse gradient, its values, with equal indices summed."""
    return gradient.coalesce().values() if gradient.is_sparse else local_of(gradient)

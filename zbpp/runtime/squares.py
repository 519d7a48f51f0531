"""Squared norms of gradients, in float64: what the norm over all ranks is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from zbpp.runtime.mesh import local_of


def square_of(gradient: Tensor) -> Tensor:
    """The sum of squares of this process's part of a gradient, a scalar on its device."""
    values = _values(gradient)
    real = torch.view_as_real(values) if values.is_complex() else values
    return torch.linalg.vector_norm(real, dtype=torch.float64).square()


def _values(gradient: Tensor) -> Tensor:
    """This process's part of a gradient; of a sparse one its entries, summed where an index occurs twice."""
    return gradient.coalesce().values() if gradient.is_sparse else local_of(gradient)

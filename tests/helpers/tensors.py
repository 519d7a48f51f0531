"""Tensors that tests draw."""

import torch
from torch import Tensor


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

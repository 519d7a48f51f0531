"""Tensors that tests draw."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients_of(stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """{`stage.name`: a copy of the gradient} of all parameters that have one."""
    named = [(f"{i}.{name}", p.grad) for i, stage in stages.items() for name, p in stage.named_parameters()]
    return {name: grad.clone() for name, grad in named if grad is not None}

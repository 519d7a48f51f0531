"""Cases: autocast and low precision."""

import torch
from torch import nn

from helpers.split import Case, leaf

BF16 = 2**-8  # half a unit in the last place, relative


def network():
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 4)
    )


def under_autocast(module, *inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module(*inputs)


def with_grad_dtype(module, dtype):
    for parameter in module.parameters():
        parameter.grad_dtype = dtype
    return module


class Everything(nn.Module):
    """A deferred weight of each kind, one behind a chain, and one computed in B."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.linear, self.experts = nn.Linear(8, 8), nn.Parameter(torch.randn(2, 8, 8) / 3)
        self.convolution, self.norm = nn.Conv1d(5, 5, 3, padding=1), nn.LayerNorm(8)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        x = torch.bmm(torch.stack([x, x]).flatten(1, 2), self.experts * 0.5).tanh().sum(0).view(-1, 5, 8)
        return self.convolution(self.linear(x))


def linear_layers_under_autocast() -> Case:
    return Case(network, lambda: leaf(6, 8), under_autocast, dtype=torch.float32, tolerance=4 * BF16)


def convolution_under_autocast() -> Case:
    return Case(
        lambda: nn.Conv1d(4, 8, 3),
        lambda: leaf(2, 4, 9),
        under_autocast,
        dtype=torch.float32,
        tolerance=4 * BF16,
    )


def weight_cast_once_for_two_uses() -> Case:
    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(torch.tanh(super().forward(x)))

    return Case(
        lambda: Twice(8, 8), lambda: leaf(6, 8), under_autocast, dtype=torch.float32, tolerance=4 * BF16
    )


def parameters_in_bfloat16() -> Case:
    return Case(network, lambda: leaf(6, 8), dtype=torch.bfloat16, tolerance=4 * BF16)


def gradients_wider_than_parameters(grad_dtype=torch.float64, hook=None) -> Case:
    def make_module():
        module = with_grad_dtype(Everything(), grad_dtype)
        for parameter in module.parameters() if hook else ():
            parameter.register_hook(hook)
        return module

    return Case(make_module, lambda: torch.randint(11, (3, 5)), dtype=torch.float32, tolerance=1e-5)

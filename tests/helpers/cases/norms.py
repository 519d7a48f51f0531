"""Cases: norms, and weights that are computed from others."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from helpers.split import Case, leaf

NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(4), (2, 5, 4)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(4, bias=False), (2, 5, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (2, 5, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 5)),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 5)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (2, 4, 5, 5)),
    "BatchNorm in eval mode": (lambda: nn.BatchNorm1d(4).eval(), (5, 4)),
}


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT


class Halved(nn.Module):
    """One edge: a chain that computes."""

    def forward(self, x):
        return x / 2


COMPUTED_WEIGHTS = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "weight_norm of a convolution": lambda: parametrizations.weight_norm(nn.Conv1d(4, 4, 1)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "symmetric": lambda: parametrized(Symmetric()),
}


def parametrized(parametrization):
    linear = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(linear, "weight", parametrization)
    return linear


def norm(name="LayerNorm") -> Case:
    make_module, shape = NORMS[name]
    return Case(make_module, lambda: leaf(*shape))


def layers_around_norm(name="LayerNorm") -> Case:
    make_module, shape = NORMS[name]

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.norm = nn.Linear(shape[-1], shape[-1]), make_module()
            self.after = nn.Linear(shape[-1], 3)

        def forward(self, x):
            return self.after(torch.tanh(self.norm(self.before(x))))

    return Case(Between, lambda: leaf(*shape))


def running_statistics(counted=None) -> Case:
    counted = [] if counted is None else counted

    def call(module, x):
        output = module(x)
        counted.append(int(module[1].num_batches_tracked))
        return output

    return Case(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), lambda: leaf(5, 4), call)


def weight_with_tree(name="weight_norm") -> Case:
    shape = (2, 4, 5) if "convolution" in name else (5, 4)
    return Case(COMPUTED_WEIGHTS[name], lambda: leaf(*shape))


def weight_with_chain() -> Case:
    return Case(lambda: parametrized(Halved()), lambda: leaf(5, 4))


def chain_used_twice(runs=None) -> Case:
    runs = [] if runs is None else runs

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight * 2

        @staticmethod
        def backward(ctx, grad):
            runs.append(1)
            return grad * 2

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            weight = Counted.apply(self.weight)
            return torch.tanh(x @ weight) @ weight

    return Case(Twice, lambda: leaf(5, 4))

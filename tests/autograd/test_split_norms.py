"""The split backward of norms, whose small gradients B computes, and of weights that are computed."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from helpers.split import assert_equals_plain, leaf
from zbpp.autograd import node_roles

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


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_computed_in_b(name):
    """Its buffers are compared too, and stay as F left them."""
    make_module, shape = NORMS[name]
    facts = assert_equals_plain(make_module, lambda: leaf(*shape))
    assert facts.deferred == set()


@pytest.mark.parametrize("name", NORMS)
def test_layers_around_a_norm_are_deferred(name):
    make_module, shape = NORMS[name]

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.norm = nn.Linear(shape[-1], shape[-1]), make_module()
            self.after = nn.Linear(shape[-1], 3)

        def forward(self, x):
            return self.after(torch.tanh(self.norm(self.before(x))))

    facts = assert_equals_plain(Between, lambda: leaf(*shape))
    assert facts.deferred == {"before.weight", "before.bias", "after.weight", "after.bias"}


def test_running_statistics_move_once_per_forward():
    """Equal to plain autograd's, and counted: B and W run no forward."""
    counted = []

    def call(module, x):
        output = module(x)
        counted.append(int(module[1].num_batches_tracked))
        return output

    assert_equals_plain(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), lambda: leaf(5, 4), call)
    assert counted == [1, 2, 1, 2]


# ---------------------------------------------------------------- weights that are computed from others


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


@pytest.mark.parametrize("name", COMPUTED_WEIGHTS)
def test_a_weight_with_a_tree_behind_it_is_computed_in_b(name):
    shape = (2, 4, 5) if "convolution" in name else (5, 4)
    facts = assert_equals_plain(COMPUTED_WEIGHTS[name], lambda: leaf(*shape))
    assert facts.deferred <= {"bias"}
    assert facts.computed >= {name for name in facts.grads if name != "bias"}


def test_a_weight_with_a_chain_behind_it_is_deferred():
    facts = assert_equals_plain(lambda: parametrized(Halved()), lambda: leaf(5, 4))
    assert "parametrizations.weight.original" in facts.deferred


def test_a_chain_runs_once_per_microbatch_however_often_the_weight_is_used():
    """Two sites share the chain's head: their gradients are summed there first."""
    runs = []

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

    facts = assert_equals_plain(Twice, lambda: leaf(5, 4))
    assert facts.deferred == ({"weight"} if node_roles.FUNCTION_NODES_LIVE else set())
    assert len(runs) == 2 + 2  # two microbatches of plain autograd, two of ours

"""explain() says beforehand what backward_input then does, and why."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from helpers.cases.checkpoint import reentrant, torchs
from helpers.cases.functions import Deferring, Layer
from zbpp.autograd import backward_input, checkpoint, explain
from zbpp.autograd.weight_grads import ComputedTask
from zbpp.models.gpt import Gpt
from zbpp.models.llama import Llama


class Tied(nn.Module):
    """One weight, in a product and by itself."""

    def __init__(self, used_in_b):
        super().__init__()
        self.linear, self.used_in_b = nn.Linear(4, 4, bias=False), used_in_b

    def forward(self, x):
        y = torch.relu(self.linear(x)) @ self.linear.weight.t()
        return y + self.linear.weight.sum() if self.used_in_b else y


class Saved(nn.Module):
    """A linear layer whose saved tensors are packed by hooks."""

    def __init__(self, hooks):
        super().__init__()
        self.linear, self.hooks = nn.Linear(4, 4), hooks

    def forward(self, x):
        with self.hooks():
            return torch.relu(self.linear(x))


class Recomputed(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x):
        return self.how(self.second, torch.relu(self.first(x)))


def own_hooks():
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def frozen_weight():
    layer = nn.Linear(4, 4)
    layer.weight.requires_grad_(False)
    return layer


def normed():
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


# module, {name: (where, what the reason says)}
CASES = {
    "linear": (lambda: nn.Linear(4, 4), {"weight": ("W", "through TBackward0"), "bias": ("W", "Addmm")}),
    "norm": (
        lambda: nn.LayerNorm(4),
        {"weight": ("B", "used by NativeLayerNormBackward0, which has no rule")},
    ),
    "tied": (lambda: Tied(False), {"linear.weight": ("W", "MmBackward0 through TBackward0 (2 uses)")}),
    "tied, used in B": (
        lambda: Tied(True),
        {"linear.weight": ("B", "also used by AddBackward0 through SumBackward0, which has no rule, so all")},
    ),
    "function": (
        lambda: Layer(Deferring),
        {"weight": ("B", "used by DeferringBackward, which has no rule")},
    ),
    "own hooks": (lambda: Saved(own_hooks), {"linear.weight": ("B", "packed or sparse saved tensors")}),
    "on the host": (
        lambda: Saved(torch.autograd.graph.save_on_cpu),
        {"linear.weight": ("W", "AddmmBackward0 through TBackward0")},
    ),
    "torch's checkpoint": (
        lambda: Recomputed(torchs),
        {
            "first.weight": ("W", "TBackward0"),
            "second.weight": ("B", "packed or sparse saved tensors"),
        },
    ),
    "frozen weight": (
        frozen_weight,
        {"bias": ("B", "used by AddmmBackward0, whose weight does not wait"), "weight": ("none", "frozen")},
    ),
    "weight norm": (
        normed,
        {"parametrizations.weight.original0": ("B", "has no rule"), "bias": ("B", "wait")},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_reason_is_told(case):
    make, expected = CASES[case]
    module = make()
    x = torch.randn(3, 4, requires_grad=True)
    rows = {row.name: row for row in explain(module(x), x, module.named_parameters()).rows}
    for name, (where, why) in expected.items():
        assert rows[name].where == where, rows[name]
        assert why in rows[name].why


def decided(weight_grads):
    """Where each leaf's gradient is computed, of a finished B."""
    return {id(task.leaf): "B" if isinstance(task, ComputedTask) else "W" for task in weight_grads._tasks}


MODELS = {
    **{
        name: (make, lambda: torch.randn(3, 4, requires_grad=True))
        for name, (make, _) in CASES.items()
        if name != "function"  # which calls defer: nothing but its backward knows
    },
    "convolutions": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1, bias=False)),
        lambda: torch.randn(2, 3, 8, requires_grad=True),
    ),
    "lstm": (lambda: nn.LSTM(4, 4, batch_first=True), lambda: torch.randn(2, 5, 4, requires_grad=True)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: torch.randn(2, 5, 8, requires_grad=True),
    ),
    "llama": (
        lambda: llama().build_stage(1, 2),
        lambda: torch.randn(2, 8, 32, requires_grad=True),
    ),
    "llama's first stage": (lambda: llama().build_stage(0, 2), lambda: torch.randint(0, 64, (2, 8))),
    "gpt's first stage": (
        lambda: Gpt(vocab_size=64, num_layers=2, hidden_size=32, num_heads=2, sequence_length=8).build_stage(
            0, 2
        ),
        lambda: torch.randint(0, 64, (2, 8)),
    ),
}


def llama():
    return Llama(vocab_size=64, num_layers=2, hidden_size=32, num_heads=2, sequence_length=8)


@pytest.mark.parametrize("model", MODELS)
def test_b_then_does_what_was_explained(model):
    """Every leaf that gets a gradient, in W or in B."""
    make, draw = MODELS[model]
    module, x = make(), draw()
    output = module(x)
    told = explain(output, [x], module.named_parameters())
    named = dict(module.named_parameters())
    said = {id(named[row.name]): row.where for row in told.rows if row.where in "WB"}
    roots = [each for each in torch.utils._pytree.tree_leaves(output) if each.requires_grad]
    _, weight_grads = backward_input(roots, [torch.randn_like(root) for root in roots], [x])
    assert said == decided(weight_grads)


def test_a_checkpoint_hides_its_parameters_until_it_is_recomputed():
    module = Recomputed(checkpoint)
    told = explain(module(torch.randn(3, 4)), (), module.named_parameters())
    rows = {row.name: (row.where, row.why) for row in told.rows}
    assert rows["first.weight"] == ("W", "AddmmBackward0 through TBackward0")
    assert rows["second.weight"][0] == "later"


def test_a_reentrant_checkpoint_puts_everything_into_b():
    module = Recomputed(reentrant)
    told = explain(module(torch.randn(3, 4, requires_grad=True)), (), module.named_parameters())
    assert {row.where for row in told.rows} == {"B"}
    assert all("reentrant checkpoint" in row.why for row in told.rows)

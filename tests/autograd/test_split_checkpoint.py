"""Activation checkpointing in the split backward: zbpp's own, and both kinds of torch's."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from helpers.cases import checkpoint as cases
from helpers.cases.checkpoint import (
    AroundReentrant,
    Block,
    Checkpointed,
    Nested,
    plainly,
    reentrant,
    torchs,
)
from helpers.split import (
    assert_close,
    double,
    float64,
    grads_of,
)
from zbpp import backward_input, checkpoint


@pytest.fixture(autouse=True)
def forwards(monkeypatch):
    """What has run so far."""
    found = []
    monkeypatch.setattr(cases, "record", found.append)
    return found


def assert_equals_without(case):
    """Under zbpp.checkpoint as without any. case(how=...): blocks under `how`."""
    found, expected = case(how=checkpoint).compare(), case(how=plainly).compare()
    assert_close(found.grads, expected.grads)
    return found


# ---------------------------------------------------------------- zbpp.checkpoint


def test_each_block_runs_forward_once_more_for_b_and_w_together(forwards):
    module = Checkpointed(checkpoint, *(Block() for _ in range(4)))
    x = torch.randn(5, 8, requires_grad=True)
    output = module(x)
    assert len(forwards) == 4
    _, weight_grads = backward_input(output, torch.ones(5, 8), x)
    assert len(forwards) == 8
    weight_grads.accumulate()
    assert len(forwards) == 8


def test_checkpoints_may_be_nested(forwards):
    facts = assert_equals_without(cases.nested_checkpoints)
    assert "inner.up.weight" in facts.deferred
    forwards.clear()
    module = Nested(checkpoint).float()
    _, weight_grads = backward_input(module(torch.randn(5, 8)), torch.ones(5, 8), ())
    weight_grads.accumulate()
    # Three in F; in B the outer's three again, then the inner's own once more.
    assert len(forwards) == 3 + 3 + 1


def test_autocast_is_in_the_recompute_what_it_was():
    def call(module, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x)

    module = Checkpointed(checkpoint, Block())
    dtypes = []
    module[0].up.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    output = call(module, torch.randn(5, 8))
    backward_input(output, torch.ones_like(output), ())
    assert dtypes == [torch.bfloat16, torch.bfloat16]


class Decoder(nn.Module):
    """Blocks that close over what the encoder made of the input, and over the input itself."""

    def __init__(self, how, num_blocks=1, *, uses_memory=False, nested=False):
        super().__init__()
        self.encoder, self.how, self.uses_memory = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), how, uses_memory
        self.blocks, self.nested = nn.ModuleList([nn.Linear(4, 4) for _ in range(num_blocks)]), nested

    def forward(self, x):
        memory = self.encoder(x)
        h = x.cos()
        for block in self.blocks:
            h = self.how(self.around(block, memory, x), h)
        return h + memory if self.uses_memory else h

    def around(self, block, memory, x):
        def run(h):
            return block(h) * memory + x.sin()

        return (lambda h: self.how(run, torch.tanh(h))) if self.nested else run


@pytest.mark.parametrize(
    ("how", "is_leaf", "nested"),
    [
        *((checkpoint, is_leaf, nested) for is_leaf in (True, False) for nested in (True, False)),
        (reentrant, True, False),
    ],
)
def test_a_function_may_close_over_a_tensor_computed_from_the_input(how, is_leaf, nested):
    """The gradient that reaches the input by that way is not lost: all stages before would train on it."""
    with float64():
        plain = Decoder(plainly, nested=nested)
    module = copy.deepcopy(plain)
    module.how = how
    x, dy = double(5, 4).requires_grad_(), double(5, 4, seed=1)
    x = x if is_leaf else x.exp()
    names, parameters = zip(*plain.named_parameters(), strict=True)
    expected = torch.autograd.grad(plain(x), (x, *parameters), dy, retain_graph=True)
    (grad,), weight_grads = backward_input(module(x), dy, x)
    weight_grads.accumulate()
    assert not is_leaf or x.grad is None
    assert_close({"x": grad, **grads_of(module)}, dict(zip(("x", *names), expected, strict=True)))


@pytest.mark.parametrize(
    "settings", [{"num_blocks": 2}, {"uses_memory": True}], ids=["by two", "and outside"]
)
def test_two_checkpoints_that_close_over_a_computed_tensor_are_refused(settings):
    """The first to go through its graph frees it."""
    with float64():
        module = Decoder(checkpoint, **settings)
    output = module(double(5, 4).requires_grad_().exp())
    with pytest.raises(RuntimeError, match="was computed outside, pass that tensor as an argument"):
        backward_input(output, torch.ones_like(output), ())[1].accumulate()


def test_a_plain_backward_names_a_tensor_that_two_checkpoints_close_over():
    module = Decoder(checkpoint, num_blocks=2)
    with pytest.raises(RuntimeError, match="was computed outside.*pass the tensor to the function as an arg"):
        module(torch.randn(5, 4)).sum().backward()


# ---------------------------------------------------------------- torch.utils.checkpoint


def test_torchs_checkpoint_recomputes_each_block_once(forwards):
    """Its saved tensors would have to be unpacked early: its weights are computed in B."""
    facts = cases.torchs_checkpoint().compare()
    assert "0.up.weight" in facts.computed
    forwards.clear()
    module = Checkpointed(torchs, *(Block() for _ in range(4)))
    x = torch.randn(5, 8, requires_grad=True)
    _, weight_grads = backward_input(module(x), torch.ones(5, 8), x)
    weight_grads.accumulate()
    assert len(forwards) == 4 + 4


@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_reentrant_checkpoint_takes_one_plain_backward_in_b(needs_grad, forwards):
    """It refuses torch.autograd.grad: nothing can wait."""
    facts = cases.reentrant_checkpoint(needs_grad).compare()
    assert facts.deferred | facts.computed == set()
    forwards.clear()
    module = AroundReentrant()
    _, weight_grads = backward_input(module(torch.randn(5, 8)), torch.ones(5, 8), ())
    assert len(forwards) == 2
    weight_grads.accumulate()
    assert len(forwards) == 2


def test_a_reentrant_checkpoint_leaves_the_inputs_grad_as_it_was():
    module = Checkpointed(reentrant, Block())
    x = torch.randn(5, 8, requires_grad=True)
    x.grad = before = torch.ones(5, 8)
    (grad,), _ = backward_input(module(x), torch.ones(5, 8), x)
    assert x.grad is before
    assert torch.equal(x.grad, torch.ones(5, 8))
    assert grad.shape == (5, 8)


def test_a_reentrant_checkpoint_allows_an_input_that_is_one_step_from_a_leaf():
    """So that a stage may change its input in place."""
    module = Checkpointed(reentrant, Block())
    x = torch.randn(5, 8, requires_grad=True)
    (expected,), _ = backward_input(module(x), torch.ones(5, 8), x)
    copied = x.clone()
    (grad,), _ = backward_input(module(copied), torch.ones(5, 8), copied)
    assert torch.equal(grad, expected)


def test_a_reentrant_checkpoint_refuses_an_input_that_was_computed():
    """What lies above an input belongs to another B, and a plain backward would not stop there."""
    above, module = nn.Linear(8, 8), Checkpointed(reentrant, Block())
    x = above(torch.randn(5, 8))
    output = module(x)
    with pytest.raises(ValueError, match=r"inputs\[0\] was computed.*use_reentrant=False"):
        backward_input(output, torch.ones(5, 8), x)
    assert above.weight.grad is None
    assert grads_of(module) == {}
    output.sum().backward()  # nothing has run


def test_a_reentrant_checkpoint_refuses_chosen_parameters():
    """A plain backward adds to the `.grad` of all."""
    module = Checkpointed(reentrant, Block())
    x = torch.randn(5, 8, requires_grad=True)
    with pytest.raises(ValueError, match="parameters.*use_reentrant=False"):
        backward_input(module(x), torch.ones(5, 8), x, parameters=[module[0].up.weight])
    assert grads_of(module) == {}

"""Activation checkpointing in the split backward: zbpp's own, and both kinds of torch's."""

import copy
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from helpers.split import (
    CountCalls,
    assert_close,
    assert_equals_plain,
    double,
    float64,
    grads_of,
    leaf,
    linear_weights,
)
from zbpp import backward_input, checkpoint
from zbpp.autograd import recompute

FORWARDS: list[str] = []


@pytest.fixture(autouse=True)
def _no_forwards():
    FORWARDS.clear()


class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(p)
        self.norm = nn.LayerNorm(8)

    def forward(self, x, scale=1.0):
        FORWARDS.append("block")
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x))))) * scale


class Checkpointed(nn.Sequential):
    """Blocks, each under `how`."""

    def __init__(self, how, *blocks):
        super().__init__(*blocks)
        self.how = how

    def forward(self, x):
        for block in self:
            x = self.how(block, x)
        return x


def plainly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def torchs(fn, *args):
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)


def reentrant(fn, *args):
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=True)


def assert_equals_without(make_module, make_inputs, call=None):
    """Under zbpp.checkpoint as without any, in B+W and in a plain backward."""
    found = assert_equals_plain(lambda: make_module(checkpoint), make_inputs, call)
    expected = assert_equals_plain(lambda: make_module(plainly), make_inputs, call)
    assert_close(found.grads, expected.grads)
    return found


# ---------------------------------------------------------------- zbpp.checkpoint


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_gradients_are_those_without_checkpointing(p):
    """Dropout too: the recompute draws the masks of the forward."""
    facts = assert_equals_without(
        lambda how: Checkpointed(how, *(Block(p) for _ in range(3))), lambda: leaf(2, 5, 8)
    )
    assert facts.deferred == linear_weights(nn.Sequential(*(Block() for _ in range(3))))


def test_each_block_runs_forward_once_more_for_b_and_w_together():
    module = Checkpointed(checkpoint, *(Block() for _ in range(4)))
    x = torch.randn(5, 8, requires_grad=True)
    output = module(x)
    assert len(FORWARDS) == 4
    _, weight_grads = backward_input(output, torch.ones(5, 8), x)
    assert len(FORWARDS) == 8
    weight_grads.accumulate()
    assert len(FORWARDS) == 8


def test_each_block_runs_forward_once_more_in_a_plain_backward():
    module = Checkpointed(checkpoint, *(Block() for _ in range(4)))
    module(torch.randn(5, 8)).sum().backward()
    assert len(FORWARDS) == 8
    assert len(grads_of(module)) == 4 * 6


def test_stage_0_trains_though_no_input_needs_grad():
    class Language(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.embedding, self.block, self.how = nn.Embedding(11, 8), Block(), how

        def forward(self, tokens):
            return self.how(lambda tokens: self.block(self.embedding(tokens)), tokens)

    facts = assert_equals_without(Language, lambda: torch.randint(11, (2, 5)))
    assert {"embedding.weight", "block.up.weight"} <= facts.deferred


def test_checkpoints_may_be_nested():
    class Nested(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.outer, self.inner, self.how = Block(0.3), Block(0.3), how

        def forward(self, x):
            return self.how(lambda x: self.outer(self.how(self.inner, self.outer(x))), x)

    facts = assert_equals_without(Nested, lambda: leaf(2, 5, 8))
    assert "inner.up.weight" in facts.deferred
    FORWARDS.clear()
    module = Nested(checkpoint).float()
    _, weight_grads = backward_input(module(torch.randn(5, 8)), torch.ones(5, 8), ())
    weight_grads.accumulate()
    # Three in F; in B the outer's three again, then the inner's own once more.
    assert len(FORWARDS) == 3 + 3 + 1


def test_keywords_and_constants_and_none():
    class Module(Checkpointed):
        def forward(self, x, scale, mask):
            def run(block, x, *, scale, times, mask):
                assert mask is None
                return block(x, scale=scale) * times

            for block in self:
                x = self.how(partial(run, block), x, scale=scale, times=2, mask=mask)
            return x

    assert_equals_without(lambda how: Module(how, Block(), Block()), lambda: (leaf(5, 8), leaf(8), None))


def test_tuples_as_outputs():
    """With a None, an integer, and one without grad among them."""

    class Module(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.block, self.how = Block(), how

        def forward(self, x):
            def run(x):
                y = self.block(x)
                return y, None, y.argmax(-1), y.sum(), y.detach()

            y, none, indices, total, detached = self.how(run, x)
            assert none is None
            assert not indices.requires_grad
            return y * detached, total * indices.sum()

    assert_equals_without(Module, lambda: leaf(5, 8))


def test_an_output_that_is_not_used():
    class Module(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.a, self.b, self.how = Block(), Block(), how

        def forward(self, x):
            return self.how(lambda x: (self.a(x), self.b(x)), x)[0]

    facts = assert_equals_plain(lambda: Module(checkpoint), lambda: leaf(5, 8))
    expected = assert_equals_plain(lambda: Module(plainly), lambda: leaf(5, 8))
    assert_close({name: grad for name, grad in facts.grads.items() if grad.abs().max() > 0}, expected.grads)


def test_a_parameter_used_inside_and_outside():
    class Module(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.block, self.how = Block(), how

        def forward(self, x):
            x = self.how(self.block, x)
            x = self.block(x) * self.block.up.weight.sum()
            return self.how(self.block, x)

    assert_equals_without(Module, lambda: leaf(5, 8))


def test_a_parameter_passed_as_an_argument():
    class Module(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.weight, self.how = nn.Parameter(torch.randn(8, 8)), how

        def forward(self, x):
            return self.how(lambda x, w: torch.tanh(x @ w), x, self.weight)

    assert_equals_without(Module, lambda: leaf(5, 8))


@pytest.mark.parametrize("frozen", ["all of it", "its first half"])
def test_a_frozen_block(frozen):
    def make_module(how):
        module = Checkpointed(how, Block(), Block(), Block())
        (module[1] if frozen == "all of it" else module[1].up).requires_grad_(False)
        return module

    facts = assert_equals_without(make_module, lambda: leaf(5, 8))
    assert not any(name.startswith("1.up") for name in facts.grads)


def test_nothing_to_train_and_nothing_to_pass_on_costs_no_recompute():
    """A wholly frozen block below all that trains."""
    frozen, trained = Block().requires_grad_(False), Block()
    output = trained(checkpoint(frozen, torch.randn(5, 8)))
    assert len(FORWARDS) == 2
    _, weight_grads = backward_input(output, torch.ones(5, 8), ())
    weight_grads.accumulate()
    assert len(FORWARDS) <= 3
    assert len(grads_of(trained)) == 6


def test_inputs_that_are_no_leaves_and_views():
    assert_equals_without(
        lambda how: Checkpointed(how, Block(), Block()), lambda: (leaf(8, 5) * 2).t().tanh()
    )


def test_in_place_operations_inside():
    class InPlace(Block):
        def forward(self, x):
            return super().forward(x).mul_(2).add_(1)

    assert_equals_without(lambda how: Checkpointed(how, InPlace(), InPlace()), lambda: leaf(5, 8))


def test_chosen_parameters_only():
    with float64():
        torch.manual_seed(0)
        module = Checkpointed(checkpoint, Block(), Block())
    x, dy = double(5, 8), double(5, 8, seed=1)
    _, weight_grads = backward_input(module(x), dy, (), parameters=[module[0].up.weight])
    weight_grads.accumulate()
    assert grads_of(module).keys() == {"0.up.weight"}


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


def test_without_gradients_it_is_the_function_itself():
    module = Checkpointed(checkpoint, Block())
    x = torch.randn(5, 8)
    with torch.no_grad():
        assert torch.equal(module(x), module[0](x))


def test_between_f_and_b_only_a_blocks_input_is_kept():
    """And between B and W what its own split keeps."""
    module = Checkpointed(checkpoint, Block())
    saved = CountCalls()
    x = torch.randn(5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved() or t, lambda t: t):
        output = module(x)
    assert saved.number == 1
    _, weight_grads = backward_input(output, torch.ones(5, 8), x)
    # x and dy of `up` and `down`, the two gradients of the norm.
    assert weight_grads.held_bytes == 4 * (5 * (8 + 16) + 5 * (16 + 8) + 2 * 8)


def test_recompute_checkpoints_a_module_and_keeps_its_names():
    module = nn.Sequential(Block(), Block())
    names = dict(module.named_parameters()).keys()
    for block in module:
        recompute(block)
    assert dict(module.named_parameters()).keys() == names
    module(torch.randn(5, 8)).sum().backward()
    assert len(FORWARDS) == 4


def test_a_block_that_fails_in_the_recompute_raises_its_error():
    class Failing(Block):
        def forward(self, x):
            if FORWARDS:
                raise KeyError("second time")
            return super().forward(x)

    output = checkpoint(Failing(), torch.randn(5, 8))
    with pytest.raises(KeyError, match="second time"):
        backward_input(output, torch.ones(5, 8), ())


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


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_function_that_closes_over_what_was_computed_from_the_input(is_leaf, nested):
    """The gradient that reaches the input by that way is not lost: all stages before would train on it."""
    with float64():
        plain = Decoder(plainly, nested=nested)
    module = copy.deepcopy(plain)
    module.how = checkpoint
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
def test_a_computed_tensor_that_two_use_by_closure_is_to_be_an_argument(settings):
    """The first to go through its graph frees it."""
    with float64():
        module = Decoder(checkpoint, **settings)
    output = module(double(5, 4).requires_grad_().exp())
    with pytest.raises(RuntimeError, match=r"as an argument what its function closes over"):
        backward_input(output, torch.ones_like(output), ())[1].accumulate()


def test_hooks_on_a_checkpointed_blocks_parameters():
    module = Checkpointed(checkpoint, Block())
    seen, after = CountCalls(), CountCalls()
    module[0].up.weight.register_hook(seen)
    module[0].down.weight.register_post_accumulate_grad_hook(after)
    _, weight_grads = backward_input(module(torch.randn(5, 8)), torch.ones(5, 8), ())
    assert after.number == 0
    weight_grads.accumulate()
    assert (seen.number, after.number) == (1, 1)


# ---------------------------------------------------------------- torch.utils.checkpoint


def test_torchs_checkpoint_recomputes_each_block_once():
    """Its saved tensors would have to be unpacked early: its weights are computed in B."""
    facts = assert_equals_plain(
        lambda: Checkpointed(torchs, *(Block(0.3) for _ in range(3)), nn.Linear(8, 8)), lambda: leaf(5, 8)
    )
    assert "0.up.weight" in facts.computed
    FORWARDS.clear()
    module = Checkpointed(torchs, *(Block() for _ in range(4)))
    x = torch.randn(5, 8, requires_grad=True)
    _, weight_grads = backward_input(module(x), torch.ones(5, 8), x)
    weight_grads.accumulate()
    assert len(FORWARDS) == 4 + 4


def test_layers_beside_torchs_checkpoint_are_deferred():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = nn.Linear(8, 8), Block(), nn.Linear(8, 8)

        def forward(self, x):
            return self.last(torchs(self.block, self.first(x)))

    facts = assert_equals_plain(Module, lambda: leaf(5, 8))
    assert {"first.weight", "last.weight"} <= facts.deferred


def test_torchs_checkpoint_on_stage_0():
    assert_equals_plain(lambda: Checkpointed(torchs, Block(), Block()), lambda: torch.randn(5, 8))


@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_reentrant_checkpoint_takes_one_plain_backward_in_b(needs_grad):
    """It refuses torch.autograd.grad: nothing can wait."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = nn.Linear(8, 8), Block(0.3), nn.Linear(8, 8)

        def forward(self, x):
            return self.last(reentrant(self.block, self.first(x)))

    facts = assert_equals_plain(
        Module, lambda: leaf(5, 8) if needs_grad else torch.randn(5, 8), grads_in_b=True
    )
    assert facts.deferred | facts.computed == set()
    FORWARDS.clear()
    module = Module()
    _, weight_grads = backward_input(module(torch.randn(5, 8)), torch.ones(5, 8), ())
    assert len(FORWARDS) == 2
    weight_grads.accumulate()
    assert len(FORWARDS) == 2


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

"""The split backward on graphs of every shape: what is frozen, unused, optional, viewed, in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.split import (
    assert_close,
    assert_equals_plain,
    assert_unchanged,
    double,
    float64,
    grads_of,
    leaf,
    linear_weights,
    output_grads,
)
from zbpp import backward_input


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def two(**changes):
    """A `Two` whose forward is another function."""
    return type("Changed", (Two,), changes)


# ---------------------------------------------------------------- frozen, unused, upstream


@pytest.mark.parametrize("frozen", ["first", "second", "first.weight", "second.weight", "first.bias"])
def test_what_is_frozen_gets_no_gradient(frozen):
    def make_module():
        module = Two()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        return module

    facts = assert_equals_plain(make_module, lambda: leaf(5, 4))
    assert facts.grads.keys() == {name for name in linear_weights(Two()) if not name.startswith(frozen)}
    assert facts.computed <= {f"{frozen.removesuffix('.weight')}.bias"}  # a bias waits with its weight only


def test_a_wholly_frozen_module_passes_the_input_gradient_on():
    facts = assert_equals_plain(lambda: Two().requires_grad_(False), lambda: leaf(5, 4))
    assert facts.deferred | facts.computed == set()
    assert facts.held_bytes == 0


def test_inputs_without_grad_get_none():
    """Stage 0, or a stage below which all is frozen: it splits like any other."""
    facts = assert_equals_plain(Two, lambda: torch.randn(5, 4))
    assert facts.deferred == linear_weights(Two())


class Embedded(nn.Module):
    """Stage 0: from the embedding up, activations too lead to parameters only, by single edges."""

    def __init__(self, weight):
        super().__init__()
        self.embedding, self.weight = nn.Embedding(11, 4), weight

    def forward(self, tokens):
        return self.weight @ self.embedding(tokens).t()


def test_an_activation_on_stage_0_is_not_taken_for_a_weight():
    facts = assert_equals_plain(
        lambda: Embedded(nn.Parameter(torch.randn(4, 4))), lambda: torch.randint(11, (5,))
    )
    assert facts.deferred == {"weight", "embedding.weight"}


def test_an_embedding_below_a_frozen_layer_keeps_its_own_dy():
    """Small, where what the wide layer above it gets is not."""
    facts = assert_equals_plain(lambda: Embedded(torch.randn(100, 4)), lambda: torch.randint(11, (5,)))
    assert facts.deferred == {"embedding.weight"}
    assert facts.held_bytes == 8 * (5 + 5 * 4)


def test_lora_adapters_are_deferred():
    class LoRA(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x)) * 0.5

    facts = assert_equals_plain(lambda: nn.Sequential(LoRA(), nn.GELU(), LoRA()), lambda: leaf(2, 5, 8))
    assert facts.deferred == {f"{i}.{name}.weight" for i in (0, 2) for name in ("down", "up")}


def test_unused_parameters_are_left_alone():
    facts = assert_equals_plain(two(forward=lambda self, x: torch.tanh(self.first(x))), lambda: leaf(5, 4))
    assert facts.grads.keys() == {"first.weight", "first.bias"}


def test_a_branch_of_parameters_only_is_computed():
    """No path from it to an input: torch's split loses it."""

    class Prompt(Two):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(2, 4))

        def forward(self, x):
            return torch.cat([self.first(self.prompt).relu(), self.second(x)])

    facts = assert_equals_plain(Prompt, lambda: leaf(5, 4))
    assert facts.grads.keys() == {"prompt"} | linear_weights(Two())
    assert "first.weight" in facts.deferred


def test_parameters_alone_are_enough():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)

        def forward(self):
            return self.linear(self.table)

    assert assert_equals_plain(Constant, tuple).grads.keys() == {"table", "linear.weight", "linear.bias"}


def test_buffers_and_constants_take_no_part():
    class Masked(Two):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0]))

        def forward(self, x):
            return super().forward(x * self.mask) * self.mask

    assert assert_equals_plain(Masked, lambda: leaf(5, 4)).deferred == linear_weights(Two())


def test_chosen_parameters_only():
    """parameters=...: the others' gradients are neither computed nor added."""
    with float64():
        torch.manual_seed(0)
        module = Two()
    x, dy = double(5, 4).requires_grad_(), double(5, 4, seed=1)
    module(x).backward(dy)
    expected, expected_grad = grads_of(module), x.grad
    module.zero_grad()
    (grad,), weight_grads = backward_input(
        module(x), dy, x, parameters=[module.first.weight, module.second.bias, module.first.weight]
    )
    weight_grads.accumulate()
    assert torch.equal(grad, expected_grad)
    found = grads_of(module)
    assert found.keys() == {"first.weight", "second.bias"}
    assert_close(found, {name: expected[name] for name in found})


def test_no_parameters_at_all_is_a_choice_too():
    module = Two()
    x = torch.randn(5, 4, requires_grad=True)
    (grad,), weight_grads = backward_input(module(x), torch.ones(5, 4), x, parameters=())
    assert weight_grads.held_bytes == 0
    weight_grads.accumulate()
    assert grad is not None
    assert grads_of(module) == {}


def test_parameters_that_the_graph_does_not_reach_may_be_named():
    module, other = Two(), Two()
    x = torch.randn(5, 4, requires_grad=True)
    _, weight_grads = backward_input(module(x), torch.ones(5, 4), x, parameters=other.parameters())
    weight_grads.accumulate()
    assert grads_of(module) == grads_of(other) == {}


# ---------------------------------------------------------------- outputs


OUTPUTS = {
    "a view": lambda y: y.view(2, 10),
    "a transpose": lambda y: y.t(),
    "a slice": lambda y: y[1:],
    "a chunk": lambda y: y.chunk(2, dim=1),
    "an expanded one": lambda y: y.expand(3, 5, 4),
    "several": lambda y: (y, y * 2, y.sum()),
    "one twice": lambda y: (y, y),
    "a dict": lambda y: {"y": y, "sum": y.sum()},
    "one without grad": lambda y: (y, y.detach()),
    "an integer": lambda y: (y, y.argmax(-1)),
    "a None": lambda y: (y, None, y.sum()),
    "a dict with constants": lambda y: {"y": y, "size": 4, "mask": y > 0, "none": None},
    "a scalar": lambda y: y.sum(),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_every_form(name):
    facts = assert_equals_plain(
        two(forward=lambda self, x: OUTPUTS[name](Two.forward(self, x))), lambda: leaf(5, 4)
    )
    assert facts.deferred == linear_weights(Two())


def test_an_output_on_the_way_to_another():
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden), hidden

    assert assert_equals_plain(two(forward=forward), lambda: leaf(5, 4)).deferred == linear_weights(Two())


def test_an_output_that_is_a_site_itself():
    """Its gradient is captured where the backward starts."""
    facts = assert_equals_plain(
        two(forward=lambda self, x: (self.first(x), self.second(x))), lambda: leaf(5, 4)
    )
    assert facts.deferred == linear_weights(Two())


def test_an_output_that_is_a_site_and_feeds_another():
    """dy is what the caller gave plus what comes from above."""

    def forward(self, x):
        y = self.first(x)
        return y, self.second(y)

    assert assert_equals_plain(two(forward=forward), lambda: leaf(5, 4)).deferred == linear_weights(Two())


def test_an_input_returned_as_it_is():
    assert_equals_plain(two(forward=lambda self, x: (x, self.first(x))), lambda: leaf(5, 4))


def test_a_parameter_returned_as_it_is():
    assert_equals_plain(two(forward=lambda self, x: (self.second.weight, self.first(x))), lambda: leaf(5, 4))


def test_a_missing_gradient_means_zero():
    """output_grads may have None for an output that needs one: nothing flows back from it."""
    with float64():
        torch.manual_seed(0)
        module = Two()
    x, dy = double(5, 4).requires_grad_(), double(5, 4, seed=1)
    (grad,), weight_grads = backward_input((module.first(x), module.second(x)), (dy, None), x)
    weight_grads.accumulate()
    assert torch.equal(grad, dy @ module.first.weight)
    assert grads_of(module).keys() == {"first.weight", "first.bias"}


def test_a_scalar_needs_no_gradient():
    with float64():
        torch.manual_seed(0)
        module = Two()
    module(double(5, 4)).square().mean().backward()
    expected = grads_of(module)
    module.zero_grad()
    _, weight_grads = backward_input(module(double(5, 4)).square().mean(), None, ())
    weight_grads.accumulate()
    assert_close(grads_of(module), expected)


# ---------------------------------------------------------------- inputs


def test_an_unused_input_gets_none():
    module = Two()
    x, unused = torch.randn(5, 4, requires_grad=True), torch.randn(3, requires_grad=True)
    grads, weight_grads = backward_input(module(x), torch.ones(5, 4), (x, unused))
    weight_grads.accumulate()
    assert grads[0].shape == (5, 4)
    assert grads[1] is None


def test_integers_and_none_among_the_inputs_get_none():
    def forward(self, x, positions, mask, scale):
        assert mask is None
        return Two.forward(self, x[positions] * scale)

    facts = assert_equals_plain(
        two(forward=forward), lambda: (leaf(5, 4), torch.tensor([0, 2, 2]), None, 0.5)
    )
    assert facts.deferred == linear_weights(Two())


def test_keywords():
    assert_equals_plain(
        two(forward=lambda self, *, x, scale: Two.forward(self, x) * scale),
        lambda: (leaf(5, 4), leaf(4)),
        lambda module, x, scale: module(scale=scale, x=x),
    )


def test_inputs_that_are_no_leaves():
    """The pass stops there, and what lies above them gets nothing."""
    facts = assert_equals_plain(Two, lambda: (leaf(5, 4) * 2).tanh())
    assert facts.deferred == linear_weights(Two())


def test_the_graph_above_an_input_is_left_alone():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = first(torch.randn(5, 4))
    (grad,), weight_grads = backward_input(second(x), torch.ones(5, 4), x)
    weight_grads.accumulate()
    assert first.weight.grad is None
    _, weight_grads = backward_input(x, grad, ())
    weight_grads.accumulate()
    assert first.weight.grad is not None


def test_one_input_may_lie_below_another():
    """Both get what torch.autograd.grad gives; weights above an input are not this B's."""
    with float64():
        torch.manual_seed(0)
        module = Two()
    x, dy = double(5, 4).requires_grad_(), double(5, 4, seed=1)
    hidden = module.first(x)
    expected = torch.autograd.grad(module.second(hidden), (hidden, x), dy, retain_graph=True)
    grads, weight_grads = backward_input(module.second(hidden), dy, (hidden, x))
    weight_grads.accumulate()
    assert all(torch.equal(*pair) for pair in zip(grads, expected, strict=True))
    assert grads_of(module).keys() == {"second.weight", "second.bias"}


def test_one_input_twice_gets_its_gradient_twice():
    module = Two()
    x = torch.randn(5, 4, requires_grad=True)
    (a, b), _ = backward_input(module(x), torch.ones(5, 4), (x, x))
    assert torch.equal(a, b)


# ---------------------------------------------------------------- losses


def test_a_loss_on_a_detached_input_reaches_its_parameters():
    """No path to the input: torch's split leaves those gradients out."""

    def forward(self, x):
        return self.first(x), F.mse_loss(self.second(x.detach()), torch.ones(5, 4))

    assert assert_equals_plain(two(forward=forward), lambda: leaf(5, 4)).grads.keys() == linear_weights(Two())


def test_several_losses_over_shared_activations():
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden).square().mean(), hidden.abs().sum(), (hidden * x).mean()

    assert assert_equals_plain(two(forward=forward), lambda: leaf(5, 4)).deferred == linear_weights(Two())


# ---------------------------------------------------------------- operations


def add_twice(self, x):
    y = self.first(x)
    y += x
    y.mul_(2).add_(1)
    return self.second(y.relu_())


def write_a_slice(self, x):
    y = self.first(x).clone()
    y[1:3] = self.second(x[:2])
    y[:, 0] *= 2
    return y


def fill_a_buffer(self, x):
    y = x.new_zeros(2, 5, 4)
    y[0] = self.first(x)
    y[1].copy_(self.second(x))
    return y


def change_the_input(self, x):
    x = x * 1  # a leaf may not be changed
    x.add_(1)
    return self.second(self.first(x).sigmoid_())


def change_a_view_of_a_sites_output(self, x):
    y = self.first(x)
    y.view(-1)[::2].mul_(3)
    return self.second(y)


IN_PLACE = [add_twice, write_a_slice, fill_a_buffer, change_the_input, change_a_view_of_a_sites_output]


@pytest.mark.parametrize("forward", IN_PLACE)
def test_in_place_operations(forward):
    facts = assert_equals_plain(two(forward=forward), lambda: leaf(5, 4))
    assert facts.deferred == linear_weights(Two())


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_has_one_mask_for_f_b_and_w(p):
    facts = assert_equals_plain(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 8), nn.Dropout(p, inplace=True)),
        lambda: leaf(2, 5, 8),
    )
    assert len(facts.deferred) == 4


def test_b_and_w_draw_no_random_numbers():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    output = module(torch.randn(5, 4))
    state = torch.get_rng_state()
    _, weight_grads = backward_input(output, torch.ones(5, 4), ())
    weight_grads.accumulate()
    assert torch.equal(torch.get_rng_state(), state)


COMPLEX = {
    "x @ w": lambda x, w: x @ w,
    "x @ w.t()": lambda x, w: x @ w.t(),
    "w @ x.t()": lambda x, w: w @ x.t(),
    "w.t() @ x.t()": lambda x, w: w.t() @ x.t(),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_weights(name):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))

        def forward(self, x):
            return torch.view_as_real(COMPLEX[name](x.to(torch.complex128) * (1 + 2j), self.weight))

    facts = assert_equals_plain(Complex, lambda: leaf(5, 4))
    assert facts.deferred == {"weight"}
    assert facts.grads["weight"].is_complex()


def test_second_microbatch_without_a_gradient_somewhere():
    """Data decides which parameters take part: each microbatch's graph is its own."""

    class Choosing(Two):
        def forward(self, x):
            return (self.first if x.sum() > 0 else self.second)(x)

    with float64():
        torch.manual_seed(0)
        module, expected = Choosing(), Choosing()
    expected.load_state_dict(module.state_dict())
    for x in (torch.ones(2, 4).double(), -torch.ones(2, 4).double(), torch.ones(2, 4).double()):
        output = module(x)
        grads = output_grads(output)
        expected(x).backward(grads)
        before = grads_of(module)
        _, weight_grads = backward_input(output, grads, ())
        assert_unchanged(module, before)
        weight_grads.accumulate()
    assert_close(grads_of(module), grads_of(expected))


def test_a_deep_graph_is_no_matter_of_recursion():
    class Deep(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            for _ in range(3000):
                y = y + x
            return y

    assert_equals_plain(lambda: Deep(4, 4), lambda: leaf(5, 4), count_products=False)


def test_a_backward_inside_the_forward_is_undisturbed():
    """torch.autograd.grad in forward: forces from an energy, a gradient penalty."""

    def forward(self, x):
        energy = Two.forward(self, x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, force

    assert_equals_plain(two(forward=forward), lambda: leaf(5, 4))


def test_gradients_are_off_while_w_runs_and_on_again_afterwards():
    module = Two()
    output = module(torch.randn(5, 4))
    _, weight_grads = backward_input(output, torch.ones(5, 4), ())
    weight_grads.accumulate()
    assert torch.is_grad_enabled()
    assert not any(parameter.grad.requires_grad for parameter in module.parameters())

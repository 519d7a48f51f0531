"""The split backward on graphs of every shape: what is frozen, unused, optional, viewed, in place."""

import pytest
import torch
from torch import nn

from helpers.cases import graphs as cases
from helpers.cases.graphs import COMPLEX, IN_PLACE, OUTPUTS, Two
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

# ---------------------------------------------------------------- frozen, unused, upstream


@pytest.mark.parametrize("frozen", ["first", "second", "first.weight", "second.weight", "first.bias"])
def test_what_is_frozen_gets_no_gradient(frozen):
    facts = cases.partly_frozen(frozen).compare()
    assert facts.grads.keys() == {name for name in linear_weights(Two()) if not name.startswith(frozen)}
    assert facts.computed <= {f"{frozen.removesuffix('.weight')}.bias"}  # a bias waits with its weight only


def test_a_wholly_frozen_module_passes_the_input_gradient_on():
    facts = cases.wholly_frozen().compare()
    assert facts.deferred | facts.computed == set()
    assert facts.held_bytes == 0


def test_inputs_without_grad_get_none():
    """Stage 0, or a stage below which all is frozen: it splits like any other."""
    facts = cases.input_without_grad().compare()
    assert facts.deferred == linear_weights(Two())


def test_an_activation_on_stage_0_is_not_taken_for_a_weight():
    facts = cases.embedding_then_layers().compare()
    assert facts.deferred == {"weight", "embedding.weight"}


def test_an_embedding_below_a_frozen_layer_keeps_its_own_dy():
    """Small, where what the wide layer above it gets is not."""
    facts = cases.embedding_below_frozen_layer().compare()
    assert facts.deferred == {"embedding.weight"}
    assert facts.held_bytes == 8 * (5 + 5 * 4)


def test_lora_adapters_are_deferred():
    facts = cases.lora().compare()
    assert facts.deferred == {f"{i}.{name}.weight" for i in (0, 2) for name in ("down", "up")}


def test_unused_parameters_are_left_alone():
    facts = cases.unused_parameters().compare()
    assert facts.grads.keys() == {"first.weight", "first.bias"}


def test_a_branch_of_parameters_only_is_computed():
    """No path from it to an input: torch's split loses it."""
    facts = cases.branch_of_parameters().compare()
    assert facts.grads.keys() == {"prompt"} | linear_weights(Two())
    assert "first.weight" in facts.deferred


def test_only_chosen_parameters_get_gradients():
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


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_may_have_every_form(name):
    facts = cases.outputs(name).compare()
    assert facts.deferred == linear_weights(Two())


def test_an_output_may_be_a_site_itself():
    """Its gradient is captured where the backward starts."""
    facts = cases.output_that_is_a_site().compare()
    assert facts.deferred == linear_weights(Two())


def test_an_output_may_be_a_site_that_feeds_another():
    """dy is what the caller gave plus what comes from above."""
    assert cases.output_that_is_a_site_and_feeds_another().compare().deferred == linear_weights(Two())


def test_an_input_may_be_returned_as_it_is():
    cases.returned_input().compare()


def test_a_parameter_may_be_returned_as_it_is():
    cases.returned_parameter().compare()


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


# ---------------------------------------------------------------- inputs


def test_integers_and_none_among_the_inputs_get_none():
    facts = cases.integers_and_none_as_inputs().compare()
    assert facts.deferred == linear_weights(Two())


def test_inputs_may_be_keywords():
    cases.keywords().compare()


def test_inputs_may_be_computed():
    """The pass stops there, and what lies above them gets nothing."""
    facts = cases.input_that_is_no_leaf().compare()
    assert facts.deferred == linear_weights(Two())


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


# ---------------------------------------------------------------- losses


def test_a_loss_on_a_detached_input_reaches_its_parameters():
    """No path to the input: torch's split leaves those gradients out."""
    assert cases.loss_on_detached_input().compare().grads.keys() == linear_weights(Two())


# ---------------------------------------------------------------- operations


@pytest.mark.parametrize("forward", IN_PLACE)
def test_in_place_operations_are_right(forward):
    facts = cases.in_place_operation(forward).compare()
    assert facts.deferred == linear_weights(Two())


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_has_one_mask_for_f_b_and_w(p):
    facts = cases.dropout(p).compare()
    assert len(facts.deferred) == 4


def test_b_and_w_draw_no_random_numbers():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    output = module(torch.randn(5, 4))
    state = torch.get_rng_state()
    _, weight_grads = backward_input(output, torch.ones(5, 4), ())
    weight_grads.accumulate()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_weights_are_deferred(name):
    facts = cases.complex_weight(name).compare()
    assert facts.deferred == {"weight"}
    assert facts.grads["weight"].is_complex()


def test_a_second_microbatch_may_lack_a_gradient_somewhere():
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
    cases.backward_inside_forward().compare()

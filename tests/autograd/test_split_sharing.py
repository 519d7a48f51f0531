"""The split backward where tensors are shared: tied weights, aliased gradients, gradients that exist."""

import pytest
import torch
from torch import nn

from helpers.cases import sharing as cases
from helpers.cases.sharing import LAYOUTS, USES_IN_B, Mixed, WithSum
from helpers.split import (
    assert_close,
    double,
    float64,
    grads_of,
    output_grads,
)
from zbpp import backward_input

# ---------------------------------------------------------------- tied weights


def test_a_weight_tied_between_two_layers_waits_for_both():
    facts = cases.tied_layers().compare()
    assert {"first.weight", "middle.weight"} <= facts.deferred
    assert facts.computed == set()


def test_a_weight_used_twice_in_one_expression_waits():
    assert cases.weight_used_twice_in_one_expression().compare().deferred == {"weight", "bias"}


def test_a_layer_applied_many_times_waits_for_all():
    assert cases.layer_applied_many_times().compare().deferred == {"weight", "bias"}


def test_a_tied_embedding_and_head_are_deferred_together():
    facts = cases.tied_embedding_and_head().compare()
    assert facts.deferred == {"embedding.weight", "layer.weight", "layer.bias"}


@pytest.mark.parametrize("name", USES_IN_B)
def test_a_weight_with_one_use_in_b_is_computed_in_b_as_a_whole(name):
    """A gradient captured at a leaf collects every path: deferring one would count it twice."""
    facts = cases.weight_with_one_use_in_b(name).compare()
    if name != "a bias of another layer":
        assert facts.computed == {"weight"}


def test_a_weight_that_is_an_input_of_b_too_gets_its_gradient_there():
    """A leaf in `inputs` is never a weight."""
    module = nn.Linear(4, 4, dtype=torch.float64)
    x, dy = double(5, 4), double(5, 4, seed=1)
    (expected,) = torch.autograd.grad(module(x), module.weight, dy)
    (found,), weight_grads = backward_input(module(x), dy, module.weight)
    weight_grads.accumulate()
    assert torch.equal(found, expected)
    assert module.weight.grad is None
    assert module.bias.grad is not None


# ---------------------------------------------------------------- gradients that alias each other


def test_a_gradient_that_is_also_dy_is_copied():
    cases.gradient_that_is_dy().compare()


def test_what_arrived_is_not_written_to_and_may_be_written_to_after_w():
    with float64():
        torch.manual_seed(0)
        module = WithSum()
    for microbatch in range(2):
        dy = double(5, 4, seed=microbatch)
        before = dy.clone()
        _, weight_grads = backward_input(module(double(5, 4)), dy, ())
        weight_grads.accumulate()
        assert torch.equal(dy, before)
        after = grads_of(module)
        dy.zero_()  # the buffer is used again
        assert all(torch.equal(grad, after[name]) for name, grad in grads_of(module).items())


def test_two_parameters_with_one_gradient_do_not_share_it():
    cases.two_parameters_with_one_gradient().compare()


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.sum(),
        lambda p: p.mean(0),
        lambda p: p.expand(3, 5, 4),
        lambda p: p[:, None].expand(5, 3, 4),
    ],
)
def test_a_gradient_without_memory_of_its_own_is_copied(use):
    """`p.sum()` gives one of stride 0."""
    facts = cases.expanded_gradient(use).compare()
    assert facts.grads["p"].stride() == (4, 1)


def test_an_input_gradient_changed_by_its_owner_does_not_disturb_w():
    """g leaves for the previous stage; on the first linear layer of a chain it may alias nothing of W's."""
    with float64():
        torch.manual_seed(0)
        module = nn.Linear(4, 4)
    expected = nn.Linear(4, 4, dtype=torch.float64)
    expected.load_state_dict(module.state_dict())
    x, dy = double(5, 4).requires_grad_(), double(5, 4, seed=1)
    expected(x).backward(dy)
    (grad,), weight_grads = backward_input(module(x), dy, x)
    grad.zero_()
    weight_grads.accumulate()
    assert_close(grads_of(module), grads_of(expected))


# ---------------------------------------------------------------- gradients that exist already


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_added_to_those_that_exist_whatever_their_strides(layout):
    facts = cases.existing_gradients(layout).compare()
    assert facts.deferred == {"linear.weight", "weight"}


def test_gradients_are_added_in_place():
    """Data parallelism looks at the same memory."""
    with float64():
        torch.manual_seed(0)
        module = Mixed()
    buffers = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.grad = buffers[name]
    _, weight_grads = backward_input(module(double(4, 4)), double(4, 4), ())
    weight_grads.accumulate()
    for name, parameter in module.named_parameters():
        assert parameter.grad is buffers[name]
        assert buffers[name].abs().max() > 0


def test_the_first_gradient_takes_the_parameters_layout():
    facts = cases.transposed_parameters().compare()
    assert facts.grads["weight"].stride() == (1, 6)
    assert facts.grads["scale"].stride() == (1, 5)


def test_w_may_come_in_any_order():
    with float64():
        torch.manual_seed(0)
        module, expected = Mixed(), Mixed()
    expected.load_state_dict(module.state_dict())
    later = []
    for microbatch in range(3):
        x = double(4, 4, seed=microbatch)
        output = module(x)
        grads = output_grads(output, microbatch)
        expected(x).backward(grads)
        later.append(backward_input(output, grads, ())[1])
    for microbatch in (1, 0, 2):
        later[microbatch].accumulate()
    assert_close(grads_of(module), grads_of(expected))

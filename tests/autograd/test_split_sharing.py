"""The split backward where tensors are shared: tied weights, aliased gradients, gradients that exist."""

import torch
from torch import nn

from helpers.cases.sharing import WithSum
from helpers.split import (
    assert_close,
    double,
    float64,
    grads_of,
)
from zbpp import backward_input

# ---------------------------------------------------------------- tied weights


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

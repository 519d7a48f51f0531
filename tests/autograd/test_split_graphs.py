"""The split backward on graphs of every shape, and where tensors are shared."""

import torch
from torch import nn

from helpers.cases.graphs import Two
from helpers.cases.sharing import WithSum
from helpers.split import (
    assert_close,
    assert_equals_plain,
    assert_unchanged,
    double,
    float64,
    grads_of,
    leaf,
    output_grads,
)
from zbpp import backward_input

# ---------------------------------------------------------------- frozen, unused, upstream


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


# ---------------------------------------------------------------- inputs


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


# ---------------------------------------------------------------- operations


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


# ---------------------------------------------------------------- tensors that are shared


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

"""What backward_input and WeightGrads refuse: which argument, what to do, and nothing half done."""

import pytest
import torch
from torch import nn

from helpers.split import assert_close, double, float64, grads_of
from zbpp import backward_input


def module_and_input():
    with float64():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)), double(5, 4).requires_grad_()


def assert_refuses(match, make_arguments, error=ValueError):
    """The call raises, changes no `.grad`, and leaves the graph as it was: the right call still works."""
    module, x = module_and_input()
    output = module(x)
    with pytest.raises(error, match=match):
        backward_input(*make_arguments(module, x, output))
    assert grads_of(module) == {}
    assert x.grad is None
    dy = double(5, 3)
    (grad,), weight_grads = backward_input(output, dy, x)
    weight_grads.accumulate()
    found = grads_of(module)
    module.zero_grad()
    module(x).backward(dy)
    assert torch.equal(grad, x.grad)
    assert_close(found, grads_of(module))


def test_an_output_that_needs_no_grad_is_refused():
    assert_refuses("no output that requires grad", lambda module, x, output: (output.detach(), None, x))


def test_no_outputs_at_all_is_refused():
    assert_refuses("no output that requires grad", lambda module, x, output: ((), (), x))


def test_only_none_among_the_gradients_is_refused():
    assert_refuses("no output that requires grad", lambda module, x, output: ((output,), (None,), x))


def test_a_gradient_for_an_output_without_grad_is_refused():
    assert_refuses(
        "output 1 does not require grad: its gradient must be None",
        lambda module, x, output: ((output, output.detach()), (double(5, 3), double(5, 3)), x),
    )


def test_a_gradient_for_an_output_that_is_no_tensor_is_refused():
    assert_refuses(
        "output 1 does not require grad",
        lambda module, x, output: ((output, None), (double(5, 3), double(5, 3)), x),
    )


@pytest.mark.parametrize("shape", [(3, 5), (5, 1), (3,), (1, 5, 3), ()])
def test_a_gradient_of_another_shape_is_refused(shape):
    """Also one that would broadcast."""
    assert_refuses(
        r"the gradient of output 0 is \(.*\) on cpu, the output \(5, 3\) on cpu",
        lambda module, x, output: (output, double(*shape), x),
    )


def test_a_gradient_on_another_device_is_refused():
    assert_refuses(
        r"the gradient of output 0 is \(5, 3\) on meta, the output \(5, 3\) on cpu",
        lambda module, x, output: (output, torch.empty(5, 3, device="meta", dtype=torch.float64), x),
    )


def test_a_gradient_of_another_dtype_is_cast_as_plain_autograd_does():
    module, x = module_and_input()
    dy = double(5, 3).float()
    _, weight_grads = backward_input(module(x), dy, x)
    weight_grads.accumulate()
    found = grads_of(module)
    module.zero_grad()
    module(x).backward(dy)
    assert_close(found, grads_of(module))


def test_a_gradient_that_is_no_tensor_is_refused():
    assert_refuses("the gradient of output 0 is a float", lambda module, x, output: (output, [1.0], x))


def test_more_gradients_than_outputs_are_refused():
    assert_refuses(
        "1 outputs but 2 output_grads", lambda module, x, output: (output, [double(5, 3), double(5, 3)], x)
    )


def test_an_output_that_is_no_scalar_needs_a_gradient():
    assert_refuses("output 0 is no scalar: give its gradient", lambda module, x, output: (output, None, x))


def test_a_parameter_that_is_no_leaf_is_refused():
    assert_refuses(
        r"parameters\[1\] of shape \(4, 4\) is not a leaf",
        lambda module, x, output: (output, double(5, 3), x, [module[0].weight, module[0].weight * 2]),
    )


def test_a_frozen_parameter_may_be_named():
    """It just gets nothing, as any that the graph does not reach."""
    module, x = module_and_input()
    module[0].requires_grad_(False)
    _, weight_grads = backward_input(module(x), double(5, 3), x, module.parameters())
    weight_grads.accumulate()
    assert grads_of(module).keys() == {"1.weight", "1.bias", "2.weight", "2.bias"}


def test_a_second_b_of_the_same_graph_is_refused():
    module, x = module_and_input()
    output = module(x)
    _, weight_grads = backward_input(output, double(5, 3), x)
    with pytest.raises(RuntimeError, match="has been gone through before.*run the forward again"):
        backward_input(output, double(5, 3), x)
    assert grads_of(module) == {}
    weight_grads.accumulate()  # what the first one left is whole
    found = grads_of(module)
    module.zero_grad()
    module(x).backward(double(5, 3))
    assert_close(found, grads_of(module))


def test_a_second_b_is_refused_where_no_rule_looks_at_the_graph():
    """Then the engine notices."""
    x = double(5).requires_grad_()
    output = (x * x).sum()
    backward_input(output, None, x)
    with pytest.raises(RuntimeError, match="has been gone through before"):
        backward_input(output, None, x)


def test_b_after_a_plain_backward_of_the_same_graph_is_refused():
    module, x = module_and_input()
    output = module(x)
    output.backward(double(5, 3))
    before = grads_of(module)
    with pytest.raises(RuntimeError, match="has been gone through before"):
        backward_input(output, double(5, 3), x)
    assert_close(grads_of(module), before, tolerance=0)


def test_a_second_b_of_stage_0s_lowest_layer_is_right_or_refused():
    """Its node has not run, but its dy is spent all the same: a second B is either right or refused."""
    linear = nn.Linear(4, 3).double()
    x, dy = double(5, 4), double(5, 3)
    output = linear(x)
    _, weight_grads = backward_input(output, dy, ())
    try:
        backward_input(output, dy, ())
    except RuntimeError as error:
        assert "has been gone through before" in str(error)  # noqa: PT017  # either is right
    weight_grads.accumulate()
    torch.testing.assert_close(linear.weight.grad, dy.t() @ x)


def test_a_second_w_is_refused():
    module, x = module_and_input()
    _, weight_grads = backward_input(module(x), double(5, 3), x)
    weight_grads.accumulate()
    before = grads_of(module)
    with pytest.raises(RuntimeError, match=r"accumulate\(\) was called before"):
        weight_grads.accumulate()
    assert_close(grads_of(module), before, tolerance=0)


def test_a_backward_that_fails_adds_nothing():
    """B computes all before W adds any."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("in the backward")

    module, x = module_and_input()
    output = module[2](Failing.apply(module[1](module[0](x))))
    with pytest.raises(KeyError, match="in the backward"):
        backward_input(output, double(5, 3), x)
    assert grads_of(module) == {}
    assert x.grad is None

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


DY = double(5, 3)
# what is said: the arguments of module, input x and output y
REFUSED = {
    "no output that requires grad": lambda module, x, y: (y.detach(), None, x),
    "no output that requires grad has": lambda module, x, y: ((y,), (None,), x),
    "output 1 does not require grad: its gradient": lambda module, x, y: ((y, y.detach()), (DY, DY), x),
    "output 1 does not require grad": lambda module, x, y: ((y, None), (DY, DY), x),
    r"is \(1, 5, 3\) on cpu, the output \(5, 3\)": lambda module, x, y: (y, DY[None], x),  # would broadcast
    r"is \(5, 3\) on meta, the output": lambda module, x, y: (y, DY.to("meta"), x),
    "the gradient of output 0 is a float": lambda module, x, y: (y, [1.0], x),
    "1 outputs but 2 output_grads": lambda module, x, y: (y, [DY, DY], x),
    "output 0 is no scalar: give its gradient": lambda module, x, y: (y, None, x),
    r"parameters\[0\] of shape \(4, 4\) is not a leaf": lambda module, x, y: (
        y,
        DY,
        x,
        [module[0].weight * 2],
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_wrong_arguments_are_refused(said):
    assert_refuses(said, REFUSED[said])


def test_a_gradient_of_another_dtype_is_cast_as_plain_autograd_does():
    module, x = module_and_input()
    dy = double(5, 3).float()
    _, weight_grads = backward_input(module(x), dy, x)
    weight_grads.accumulate()
    found = grads_of(module)
    module.zero_grad()
    module(x).backward(dy)
    assert_close(found, grads_of(module))


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

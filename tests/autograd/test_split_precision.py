"""The split backward in bfloat16: autocast, and float32 sums beside bfloat16 weights."""

import pytest
import torch
from torch import nn

from helpers.cases import precision as cases
from helpers.cases.precision import Everything
from helpers.split import grads_of
from zbpp import backward_input

# ---------------------------------------------------------------- grad_dtype


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("hook", [None, lambda grad: grad * 2])
@pytest.mark.parametrize("grad_dtype", [torch.float64, None])
def test_gradients_wider_than_their_parameters(grad_dtype, hook):
    """As autograd makes them; W sums in the wider type at once."""
    facts = cases.gradients_wider_than_parameters(grad_dtype, hook).compare()
    assert {grad.dtype for grad in facts.grads.values()} == {grad_dtype or torch.float32}
    assert facts.deferred
    assert facts.computed


# ---------------------------------------------------------------- main_grad


def with_main_grads(module):
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return module


def test_a_main_grad_sums_more_exactly_than_bfloat16_can():
    """64 equal microbatches; a sum in bfloat16 stands still long before."""
    num_microbatches = 64
    torch.manual_seed(0)
    module = with_main_grads(Everything().bfloat16())
    exact = Everything().double()
    exact.load_state_dict(module.state_dict())
    tokens = torch.randint(11, (3, 5))
    grad = torch.randn(3, 5, 8).bfloat16()
    for _ in range(num_microbatches):
        _, weight_grads = backward_input(module(tokens), grad, ())
        weight_grads.accumulate()
    exact(tokens).backward(grad.double())
    for name, expected in grads_of(exact).items():
        found = dict(module.named_parameters())[name].main_grad / num_microbatches
        scale = expected.abs().max()
        # One microbatch's activations are bfloat16 in either case: 3% is theirs.
        assert (found - expected).abs().max() <= 0.06 * scale, name


@pytest.mark.parametrize("shape", [(), (5,)])  # of a batch of matrices
def test_products_that_are_widened_a_part_at_a_time(shape, monkeypatch):
    monkeypatch.setattr("zbpp.autograd.adding._WIDENED", 2 * 4 * 300)
    torch.manual_seed(0)
    x, weight = torch.randn(*shape, 300, 8).bfloat16(), torch.randn(*shape, 8, 4).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(*shape, 8, 4)
    dy = torch.randn(*shape, 300, 4).bfloat16()
    _, weight_grads = backward_input((torch.bmm if shape else torch.mm)(x, weight), dy, ())
    weight_grads.accumulate()
    torch.testing.assert_close(weight.main_grad, x.float().mT @ dy.float())


def test_a_float32_product_of_bfloat16_factors_is_rounded_once():
    """dW of a linear layer, against the product of the very same factors in float64."""
    torch.manual_seed(0)
    module = with_main_grads(nn.Linear(8, 4).bfloat16())
    x, dy = torch.randn(300, 8).bfloat16(), torch.randn(300, 4).bfloat16()
    _, weight_grads = backward_input(module(x), dy, ())
    weight_grads.accumulate()
    expected = dy.double().t() @ x.double()
    error = (module.weight.main_grad - expected).abs().max()
    assert error <= 1e-6 * (dy.double().abs().t() @ x.double().abs()).max()

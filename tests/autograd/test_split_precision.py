"""The split backward in bfloat16: autocast, and float32 sums beside bfloat16 weights."""

import pytest
import torch
from torch import nn

from helpers.split import assert_equals_plain, grads_of, leaf, linear_weights
from zbpp import backward_input

BF16 = 2**-8  # half a unit in the last place, relative


def network():
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 4)
    )


def under_autocast(module, *inputs):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module(*inputs)


def test_weights_that_autocast_casts_are_deferred():
    """Microbatches are rounded to bfloat16 one by one in either backward, then summed in float32."""
    facts = assert_equals_plain(
        network, lambda: leaf(6, 8), under_autocast, dtype=torch.float32, tolerance=4 * BF16
    )
    assert facts.deferred == linear_weights(network())
    assert {grad.dtype for grad in facts.grads.values()} == {torch.float32}


def test_a_convolution_under_autocast_is_deferred():
    facts = assert_equals_plain(
        lambda: nn.Conv1d(4, 8, 3),
        lambda: leaf(2, 4, 9),
        under_autocast,
        dtype=torch.float32,
        tolerance=4 * BF16,
    )
    assert "weight" in facts.deferred


def test_a_weight_that_autocast_casts_once_for_two_uses_is_right():
    """Autocast caches the cast: both sites share its node."""

    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(torch.tanh(super().forward(x)))

    facts = assert_equals_plain(
        lambda: Twice(8, 8), lambda: leaf(6, 8), under_autocast, dtype=torch.float32, tolerance=4 * BF16
    )
    assert "weight" in facts.deferred


def test_parameters_in_bfloat16_have_gradients_in_bfloat16():
    facts = assert_equals_plain(network, lambda: leaf(6, 8), dtype=torch.bfloat16, tolerance=4 * BF16)
    assert facts.deferred == linear_weights(network())
    assert {grad.dtype for grad in facts.grads.values()} == {torch.bfloat16}


# ---------------------------------------------------------------- grad_dtype


def with_grad_dtype(module, dtype):
    for parameter in module.parameters():
        parameter.grad_dtype = dtype
    return module


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("hook", [None, lambda grad: grad * 2])
@pytest.mark.parametrize("grad_dtype", [torch.float64, None])
def test_gradients_wider_than_their_parameters(grad_dtype, hook):
    """As autograd makes them; W sums in the wider type at once."""

    def make_module():
        module = with_grad_dtype(Everything(), grad_dtype)
        for parameter in module.parameters() if hook else ():
            parameter.register_hook(hook)
        return module

    facts = assert_equals_plain(
        make_module, lambda: torch.randint(11, (3, 5)), dtype=torch.float32, tolerance=1e-5
    )
    assert {grad.dtype for grad in facts.grads.values()} == {grad_dtype or torch.float32}
    assert facts.deferred
    assert facts.computed


# ---------------------------------------------------------------- main_grad


class Everything(nn.Module):
    """A deferred weight of each kind, one behind a chain, and one computed in B."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.linear, self.experts = nn.Linear(8, 8), nn.Parameter(torch.randn(2, 8, 8) / 3)
        self.convolution, self.norm = nn.Conv1d(5, 5, 3, padding=1), nn.LayerNorm(8)

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        x = torch.bmm(torch.stack([x, x]).flatten(1, 2), self.experts * 0.5).tanh().sum(0).view(-1, 5, 8)
        return self.convolution(self.linear(x))


def with_main_grads(module):
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    return module


def test_a_main_grad_takes_the_gradients_and_grad_stays_empty():
    torch.manual_seed(0)
    module = with_main_grads(Everything().bfloat16())
    output = module(torch.randint(11, (3, 5)))
    _, weight_grads = backward_input(output, torch.randn_like(output), ())
    assert all(parameter.main_grad.abs().max() == 0 for parameter in module.parameters())
    weight_grads.accumulate()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(parameter.main_grad.abs().max() > 0 for parameter in module.parameters())


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_main_grad_may_have_the_parameters_dtype(dtype):
    """Then it is `.grad` under another name."""
    torch.manual_seed(0)
    module = network().to(dtype)
    x, dy = torch.randn(6, 8, dtype=dtype), torch.randn(6, 4, dtype=dtype)
    module(x).backward(dy)
    expected = grads_of(module)
    module.zero_grad()
    _, weight_grads = backward_input(with_main_grads(module).to(dtype)(x), dy, ())
    weight_grads.accumulate()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.main_grad.to(dtype), expected[name], rtol=1e-5, atol=1e-5)

"""Gradient penalties: a derivative inside forward is a part of the graph that B goes through."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.split import assert_close, double, float64, grads_of, leaf
from helpers.watch import MODULES, Squashed
from zbpp import backward_input, checkpoint
from zbpp.autograd import defer
from zbpp.autograd.compiled import compile_stage


def penalty(y, x):
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (gradient.flatten(1).norm(dim=1) - 1).square().mean()


class Scaled(torch.autograd.Function):
    """Defers its weight's gradient; each of its gradients can be differentiated again."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy * weight, defer(ctx, weight, lambda dy, x: (dy * x).sum(0), dy, x)


class Critic(nn.Module):
    """Linear layers, an embedding, a tied weight, a Function that defers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(7, 4), nn.Linear(4, 6), nn.Linear(6, 4)
        self.scale, self.norm = nn.Parameter(torch.randn(4)), nn.LayerNorm(4)

    def forward(self, x):
        x = x + self.embedding(torch.arange(5))
        x = self.down(torch.tanh(self.up(Scaled.apply(x, self.scale))))
        return F.linear(torch.tanh(self.norm(x)), self.up.weight)


CRITICS = {
    "linear": (Critic, (5, 4)),
    "convolutions": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.Tanh(), nn.Conv1d(4, 1, 3)), (5, 3, 9)),
    "computed weight": (lambda: nn.Sequential(Squashed(4, 6), nn.Softplus(), Squashed(6, 2)), (5, 4)),
    "attention": (lambda: MODULES["blocks"](), (2, 5, 16)),
}


@pytest.mark.parametrize("penalized", [False, True], ids=["without the penalty", "with it"])
@pytest.mark.parametrize("name", CRITICS)
def test_a_gradient_penalty_inside_forward_is_part_of_the_graph(name, penalized):
    make, shape = CRITICS[name]
    sides = []
    for split in (False, True):
        with float64():
            torch.manual_seed(0)
            module = make()
        x = double(*shape).requires_grad_()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            y = module(x)
            loss = y.square().mean() + (10 * penalty(y, x) if penalized else 0)
        if split:
            (grad,), later = backward_input(loss, None, x)
            assert grads_of(module) == {}
            later.accumulate()
        else:
            loss.backward()
            grad = x.grad
        sides.append(grads_of(module) | {"x": grad})
    assert_close(sides[1], sides[0])


def test_the_weight_gradient_of_a_function_that_defers_can_be_differentiated_again():
    x, weight = double(5, 4).requires_grad_(), double(4, seed=1).requires_grad_()
    y = torch.tanh(Scaled.apply(x, weight)).sum()
    plain = torch.tanh(x * weight).sum()
    second = [
        torch.autograd.grad(
            torch.autograd.grad(each, weight, create_graph=True)[0].square().sum(), (x, weight)
        )
        for each in (y, plain)
    ]
    for found, expected in zip(*second, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["zbpp.checkpoint", "compiled stage"])
def test_a_penalty_through_what_has_no_second_derivative_is_refused(kind):
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), leaf(5, 4)
    if kind == "compiled stage":
        compile_stage(module, backend="eager")
        y = module(x)
    else:
        y = checkpoint(module, x)
    with pytest.raises(RuntimeError, match=f"create_graph=True goes through (a )?{kind}"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert grads_of(module) == {}

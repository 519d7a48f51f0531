"""Cases: custom autograd Functions, with and without `defer`."""

import torch
from torch import nn

from helpers.split import Case, leaf
from zbpp.autograd import defer


def record(event):
    """Does nothing. A test replaces it to see what runs."""


class Eager(torch.autograd.Function):
    """x @ w.T with an ordinary backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        record("backward")
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.t() @ x


class Deferring(Eager):
    """The same, whose weight gradient can wait."""

    @staticmethod
    def backward(ctx, dy):
        record("backward")
        x, weight = ctx.saved_tensors
        return dy @ weight, defer(ctx, weight, product, dy, x)


def product(dy, x):
    record("compute")
    assert not torch.is_grad_enabled()
    return dy.t() @ x


class Layer(nn.Module):
    def __init__(self, function, change=lambda weight: weight):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.function, self.change = function, change

    def forward(self, x):
        return self.function.apply(x, self.change(self.weight))


def function_between_layers() -> Case:
    return Case(lambda: nn.Sequential(nn.Linear(4, 4), Layer(Eager), nn.Linear(4, 4)), lambda: leaf(5, 4))


def deferring_function_above_layer() -> Case:
    return Case(
        lambda: nn.Sequential(nn.Linear(4, 4), Layer(Deferring)), lambda: leaf(5, 4), num_microbatches=1
    )


def deferring_function_on_stage_0() -> Case:
    return Case(lambda: Layer(Deferring), lambda: torch.randn(5, 4))


def deferring_function_of_computed_weight() -> Case:
    return Case(lambda: Layer(Deferring, change=lambda w: w * 2), lambda: leaf(5, 4))


def deferring_function_of_frozen_weight() -> Case:
    def make_module():
        layer = Layer(Deferring)
        layer.weight.requires_grad_(False)
        return layer

    return Case(make_module, lambda: leaf(5, 4))


def weight_of_function_and_layer() -> Case:
    class Both(Layer):
        def forward(self, x):
            return nn.functional.linear(torch.tanh(super().forward(x)), self.weight)

    return Case(lambda: Both(Deferring), lambda: leaf(5, 4))


def weight_of_function_used_twice() -> Case:
    class Twice(Layer):
        def forward(self, x):
            return super().forward(torch.tanh(super().forward(x)))

    return Case(lambda: Twice(Deferring), lambda: leaf(5, 4))


def function_that_saves_history() -> Case:
    class Saves(Eager):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            assert x.grad_fn is not None
            return dy @ weight, defer(ctx, weight, lambda dy, x: record(x.grad_fn) or dy.t() @ x, dy, x)

    return Case(lambda: nn.Sequential(nn.Linear(4, 4), Layer(Saves)), lambda: leaf(5, 4))


def function_with_two_outputs() -> Case:
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t(), x * 2

        @staticmethod
        def backward(ctx, dy, dx):
            record("backward")
            x, weight = ctx.saved_tensors
            return dy @ weight + 2 * dx, dy.t() @ x

    class First(Layer):
        def forward(self, x):
            return super().forward(x)[0]

    return Case(lambda: First(Pair), lambda: leaf(5, 4))


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight * 3

    @staticmethod
    def backward(ctx, grad):
        record("chain")
        return grad * 3


class OfTripled(nn.Module):
    """A linear layer whose weight is a Function of a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return nn.functional.linear(x, Tripled.apply(self.weight))


def function_of_the_weight_alone() -> Case:
    return Case(OfTripled, lambda: leaf(5, 4))

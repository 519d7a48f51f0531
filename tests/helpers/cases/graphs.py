"""Cases: graphs of every form."""

import torch
import torch.nn.functional as F
from torch import nn

from helpers.split import Case, leaf


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def two(**changes):
    """A `Two` whose forward is another function."""
    return type("Changed", (Two,), changes)


class Embedded(nn.Module):
    """Stage 0: from the embedding up, activations too lead to parameters only, by single edges."""

    def __init__(self, weight):
        super().__init__()
        self.embedding, self.weight = nn.Embedding(11, 4), weight

    def forward(self, tokens):
        return self.weight @ self.embedding(tokens).t()


OUTPUTS = {
    "a view": lambda y: y.view(2, 10),
    "a transpose": lambda y: y.t(),
    "a slice": lambda y: y[1:],
    "a chunk": lambda y: y.chunk(2, dim=1),
    "an expanded one": lambda y: y.expand(3, 5, 4),
    "several": lambda y: (y, y * 2, y.sum()),
    "one twice": lambda y: (y, y),
    "a dict": lambda y: {"y": y, "sum": y.sum()},
    "one without grad": lambda y: (y, y.detach()),
    "an integer": lambda y: (y, y.argmax(-1)),
    "a None": lambda y: (y, None, y.sum()),
    "a dict with constants": lambda y: {"y": y, "size": 4, "mask": y > 0, "none": None},
    "a scalar": lambda y: y.sum(),
}


COMPLEX = {
    "x @ w": lambda x, w: x @ w,
    "x @ w.t()": lambda x, w: x @ w.t(),
    "w @ x.t()": lambda x, w: w @ x.t(),
    "w.t() @ x.t()": lambda x, w: w.t() @ x.t(),
}


def partly_frozen(frozen="first") -> Case:
    def make_module():
        module = Two()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        return module

    return Case(make_module, lambda: leaf(5, 4))


def wholly_frozen() -> Case:
    return Case(lambda: Two().requires_grad_(False), lambda: leaf(5, 4))


def input_without_grad() -> Case:
    return Case(Two, lambda: torch.randn(5, 4))


def embedding_then_layers() -> Case:
    return Case(lambda: Embedded(nn.Parameter(torch.randn(4, 4))), lambda: torch.randint(11, (5,)))


def embedding_below_frozen_layer() -> Case:
    return Case(lambda: Embedded(torch.randn(100, 4)), lambda: torch.randint(11, (5,)))


def lora() -> Case:
    class LoRA(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x)) * 0.5

    return Case(lambda: nn.Sequential(LoRA(), nn.GELU(), LoRA()), lambda: leaf(2, 5, 8))


def unused_parameters() -> Case:
    return Case(two(forward=lambda self, x: torch.tanh(self.first(x))), lambda: leaf(5, 4))


def branch_of_parameters() -> Case:
    class Prompt(Two):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(2, 4))

        def forward(self, x):
            return torch.cat([self.first(self.prompt).relu(), self.second(x)])

    return Case(Prompt, lambda: leaf(5, 4))


def parameters_alone() -> Case:
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)

        def forward(self):
            return self.linear(self.table)

    return Case(Constant, tuple)


def buffers_and_constants() -> Case:
    class Masked(Two):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0]))

        def forward(self, x):
            return super().forward(x * self.mask) * self.mask

    return Case(Masked, lambda: leaf(5, 4))


def outputs(name="a view") -> Case:
    return Case(two(forward=lambda self, x: OUTPUTS[name](Two.forward(self, x))), lambda: leaf(5, 4))


def output_on_the_way_to_another() -> Case:
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden), hidden

    return Case(two(forward=forward), lambda: leaf(5, 4))


def output_that_is_a_site() -> Case:
    return Case(two(forward=lambda self, x: (self.first(x), self.second(x))), lambda: leaf(5, 4))


def output_that_is_a_site_and_feeds_another() -> Case:
    def forward(self, x):
        y = self.first(x)
        return y, self.second(y)

    return Case(two(forward=forward), lambda: leaf(5, 4))


def returned_input() -> Case:
    return Case(two(forward=lambda self, x: (x, self.first(x))), lambda: leaf(5, 4))


def returned_parameter() -> Case:
    return Case(two(forward=lambda self, x: (self.second.weight, self.first(x))), lambda: leaf(5, 4))


def integers_and_none_as_inputs() -> Case:
    def forward(self, x, positions, mask, scale):
        assert mask is None
        return Two.forward(self, x[positions] * scale)

    return Case(two(forward=forward), lambda: (leaf(5, 4), torch.tensor([0, 2, 2]), None, 0.5))


def keywords() -> Case:
    return Case(
        two(forward=lambda self, *, x, scale: Two.forward(self, x) * scale),
        lambda: (leaf(5, 4), leaf(4)),
        lambda module, x, scale: module(scale=scale, x=x),
    )


def input_that_is_no_leaf() -> Case:
    return Case(Two, lambda: (leaf(5, 4) * 2).tanh())


def loss_on_detached_input() -> Case:
    def forward(self, x):
        return self.first(x), F.mse_loss(self.second(x.detach()), torch.ones(5, 4))

    return Case(two(forward=forward), lambda: leaf(5, 4))


def several_losses() -> Case:
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden).square().mean(), hidden.abs().sum(), (hidden * x).mean()

    return Case(two(forward=forward), lambda: leaf(5, 4))


def add_twice(self, x):
    y = self.first(x)
    y += x
    y.mul_(2).add_(1)
    return self.second(y.relu_())


def write_a_slice(self, x):
    y = self.first(x).clone()
    y[1:3] = self.second(x[:2])
    y[:, 0] *= 2
    return y


def fill_a_buffer(self, x):
    y = x.new_zeros(2, 5, 4)
    y[0] = self.first(x)
    y[1].copy_(self.second(x))
    return y


def change_the_input(self, x):
    x = x * 1  # a leaf may not be changed
    x.add_(1)
    return self.second(self.first(x).sigmoid_())


def change_a_view_of_a_sites_output(self, x):
    y = self.first(x)
    y.view(-1)[::2].mul_(3)
    return self.second(y)


IN_PLACE = [add_twice, write_a_slice, fill_a_buffer, change_the_input, change_a_view_of_a_sites_output]


def in_place_operation(forward=add_twice) -> Case:
    return Case(two(forward=forward), lambda: leaf(5, 4))


def dropout(p=0.0) -> Case:
    return Case(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 8), nn.Dropout(p, inplace=True)),
        lambda: leaf(2, 5, 8),
    )


def complex_weight(name="x @ w") -> Case:
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))

        def forward(self, x):
            return torch.view_as_real(COMPLEX[name](x.to(torch.complex128) * (1 + 2j), self.weight))

    return Case(Complex, lambda: leaf(5, 4))


def backward_inside_forward() -> Case:
    def forward(self, x):
        energy = Two.forward(self, x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy, force

    return Case(two(forward=forward), lambda: leaf(5, 4))

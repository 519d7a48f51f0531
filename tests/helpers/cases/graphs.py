"""Cases: graphs of every form."""

import torch
from torch import nn

from helpers.split import Case, leaf


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Embedded(nn.Module):
    """Stage 0: from the embedding up, activations too lead to parameters only, by single edges."""

    def __init__(self, weight):
        super().__init__()
        self.embedding, self.weight = nn.Embedding(11, 4), weight

    def forward(self, tokens):
        return self.weight @ self.embedding(tokens).t()


def output_that_feeds_another(self, x):
    y = self.first(x)
    return y, self.second(y)


def several_losses(self, x):
    hidden = torch.tanh(self.first(x))
    return self.second(hidden).square().mean(), hidden.abs().sum(), (hidden * x).mean()


def backward_inside(self, x):
    energy = Two.forward(self, x).square().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy, force


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


def change_a_view(self, x):
    y = self.first(x)
    y.view(-1)[::2].mul_(3)
    return self.second(y)


def output_of(change):
    """The forward of `Two`, whose output is changed."""
    return lambda self, x: change(Two.forward(self, x))


FORWARDS = {
    "a view": output_of(lambda y: y.view(2, 10)),
    "a transpose": output_of(lambda y: y.t()),
    "a slice": output_of(lambda y: y[1:]),
    "a chunk": output_of(lambda y: y.chunk(2, dim=1)),
    "an expanded one": output_of(lambda y: y.expand(3, 5, 4)),
    "several": output_of(lambda y: (y, y * 2, y.sum())),
    "one twice": output_of(lambda y: (y, y)),
    "a dict": output_of(lambda y: {"y": y, "sum": y.sum()}),
    "one without grad": output_of(lambda y: (y, y.detach())),
    "an integer": output_of(lambda y: (y, y.argmax(-1))),
    "a None": output_of(lambda y: (y, None, y.sum())),
    "a dict with constants": output_of(lambda y: {"y": y, "size": 4, "mask": y > 0, "none": None}),
    "a scalar": output_of(lambda y: y.sum()),
    "a site": lambda self, x: (self.first(x), self.second(x)),
    "a site that feeds another": output_that_feeds_another,
    "losses": several_losses,
    "the input": lambda self, x: (x, self.first(x)),
    "a parameter": lambda self, x: (self.second.weight, self.first(x)),
    "a loss on the detached input": lambda self, x: (self.first(x), self.second(x.detach()).square().mean()),
    "a gradient": backward_inside,
    "in place: add": add_twice,
    "in place: a slice": write_a_slice,
    "in place: a buffer": fill_a_buffer,
    "in place: the input": change_the_input,
    "in place: a view": change_a_view,
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


def branch_of_parameters() -> Case:
    class Prompt(Two):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(2, 4))

        def forward(self, x):
            return torch.cat([self.first(self.prompt).relu(), self.second(x)])

    return Case(Prompt, lambda: leaf(5, 4))


def integers_and_none_as_inputs() -> Case:
    def forward(self, x, positions, mask, scale):
        assert mask is None
        return Two.forward(self, x[positions] * scale)

    changed = type("Changed", (Two,), {"forward": forward})
    return Case(changed, lambda: (leaf(5, 4), torch.tensor([0, 2, 2]), None, 0.5))


def forward(name="a view") -> Case:
    return Case(type("Changed", (Two,), {"forward": FORWARDS[name]}), lambda: leaf(5, 4))


def input_that_is_no_leaf() -> Case:
    return Case(Two, lambda: (leaf(5, 4) * 2).tanh())


def dropout(p=0.0) -> Case:
    return Case(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 8), nn.Dropout(p, inplace=True)),
        lambda: leaf(2, 5, 8),
    )

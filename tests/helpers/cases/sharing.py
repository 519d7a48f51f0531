"""Cases: weights with several uses, gradients that share memory."""

import torch
from torch import nn

from helpers.split import Case, leaf


class Tied(nn.Module):
    """Two layers with one weight, and what lies between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.middle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.middle(self.first(x))))


USES_IN_B = {
    "a penalty": lambda x, w: (x @ w, (w**2).sum()),
    "an element-wise use": lambda x, w: x @ w * w[0],
    "a use through a tree": lambda x, w: x @ w + x @ (w / w.norm()),
    "a shared view": lambda x, w: (lambda t: x @ t + t.sum())(w.t()),
    "a shared computation": lambda x, w: (lambda h: x @ h + h.sum())(w * 2),
    "itself as output": lambda x, w: (x @ w, w * 1),
    "a bias of another layer": lambda x, w: torch.addmm(w, x, w),
}


class WithSum(nn.Module):
    """The gradient of p IS dy of the linear layer IS the gradient that arrived."""

    def __init__(self):
        super().__init__()
        self.linear, self.p = nn.Linear(4, 4), nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return self.linear(x) + self.p


LAYOUTS = {
    "contiguous": lambda grad: grad.clone(),
    "transposed": lambda grad: grad.t().contiguous().t(),
    "with gaps": lambda grad: torch.zeros(8, 8)[::2, ::2].copy_(grad),
}


class Mixed(nn.Module):
    """A deferred weight, one behind a view, one computed in B."""

    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(4, 4, bias=False), nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.linear(x) @ self.weight * self.scale


def tied_layers() -> Case:
    return Case(lambda: Tied(torch.tanh), lambda: leaf(5, 4))


def layer_applied_many_times() -> Case:
    class Loop(nn.Linear):
        def forward(self, x):
            for _ in range(5):
                x = torch.tanh(super().forward(x))
            return x

    return Case(lambda: Loop(4, 4), lambda: leaf(5, 4))


def tied_embedding_and_head() -> Case:
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layer = nn.Embedding(11, 4, padding_idx=2), nn.Linear(4, 4)
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(torch.tanh(self.layer(self.embedding(tokens))))

    return Case(Language, lambda: torch.randint(11, (2, 5)))


def weight_with_one_use_in_b(name="a penalty") -> Case:
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return USES_IN_B[name](x, self.weight)

    return Case(Module, lambda: leaf(4, 4))


def gradient_that_is_dy() -> Case:
    return Case(WithSum, lambda: leaf(5, 4), num_microbatches=3)


def expanded_gradient(use=lambda p: p.sum()) -> Case:
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.randn(5, 4))

        def forward(self, x):
            return x.sum() + use(self.p)

    return Case(Module, lambda: leaf(5, 4), num_microbatches=3)


def existing_gradients(layout="contiguous") -> Case:
    def make_module():
        module = Mixed()
        for parameter in module.parameters():
            parameter.grad = LAYOUTS[layout](torch.randn(4, 4))
        return module

    return Case(make_module, lambda: leaf(4, 4))


def transposed_parameters() -> Case:
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6).t())
            self.scale = nn.Parameter(torch.randn(4, 5).t())

        def forward(self, x):
            return (x @ self.weight) * self.scale

    return Case(Transposed, lambda: leaf(5, 6))

"""Cases: hooks."""

import torch
from torch import nn

from helpers.split import Case, leaf


class Module(nn.Module):
    """A weight deferred in one piece, one used twice, one behind a chain, one computed in B."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.chained = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(self.norm(x)))) @ (self.chained * 2)


class Hooked(nn.Module):
    """A hook on what a site puts out, and on what it takes in."""

    def __init__(self, seen):
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(4, 4), nn.Linear(4, 4), seen

    def forward(self, x):
        y = self.first(x)
        y.register_hook(lambda grad: self.seen.append(grad.clone()) or grad * 2)
        z = torch.tanh(y)
        z.register_hook(lambda grad: self.seen.append(grad.clone()) or grad + 1)
        z.retain_grad()
        self.z = z
        return self.second(z)


def scaled(grads, *_):
    return tuple(None if grad is None else grad * 3 for grad in grads)


class OnNodes(nn.Module):
    """Two layers; hooks on the nodes of the first, which runs in B only if x needs a gradient."""

    def __init__(self, register):
        super().__init__()
        self.first, self.second, self.register = nn.Linear(4, 4), nn.Linear(4, 4), register

    def forward(self, x):
        y = self.first(x)
        getattr(y.grad_fn, self.register)(scaled)
        return self.second(torch.tanh(y))


def hooks_that_replace_gradients() -> Case:
    def make_module():
        module = Module()
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: grad * 2)
            parameter.register_hook(lambda grad: None)
            parameter.register_hook(lambda grad: grad + 1)
        return module

    return Case(make_module, lambda: leaf(5, 4))


def hook_on_input() -> Case:
    def call(module, x):
        x.register_hook(lambda grad: grad * 3)
        return module(x)

    return Case(Module, lambda: leaf(5, 4), call)


def hook_on_weight_with_use_in_b() -> Case:
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.weight.register_hook(lambda grad: grad.clamp(-1, 1))

        def forward(self, x):
            return x @ self.weight + self.weight.sum()

    return Case(Both, lambda: leaf(5, 4))


def hooks_on_activations(seen=None) -> Case:
    seen = [] if seen is None else seen
    return Case(lambda: Hooked(seen), lambda: leaf(5, 4))


def hooks_on_activations_of_stage_0(seen=None) -> Case:
    seen = [] if seen is None else seen
    return Case(lambda: Hooked(seen), lambda: torch.randn(5, 4))


def full_backward_hooks(calls=None) -> Case:
    calls = [] if calls is None else calls

    def make_module():
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for child in module:
            child.register_full_backward_hook(lambda m, gi, go: calls.append(type(m).__name__))
            child.register_full_backward_pre_hook(lambda m, go: calls.append("pre"))
        return module

    return Case(make_module, lambda: leaf(5, 4))


def full_backward_hook_that_changes_gradient() -> Case:
    def make_module():
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 5,))
        return module

    return Case(make_module, lambda: leaf(5, 4))


def hooks_on_nodes(calls=None) -> Case:
    calls = [] if calls is None else calls

    class Counting(nn.Linear):
        def forward(self, x):
            y = torch.tanh(super().forward(x))
            y.grad_fn.register_prehook(lambda grads: calls.append("pre"))
            y.grad_fn.register_hook(lambda grads, outputs: calls.append("post"))
            return y

    return Case(lambda: Counting(4, 4), lambda: leaf(5, 4))


def hook_on_node_of_layer(register="register_hook", needs_grad=True) -> Case:
    return Case(lambda: OnNodes(register), lambda: torch.randn(5, 4, requires_grad=needs_grad))


def non_full_backward_hook() -> Case:
    def make_module():
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[0].register_backward_hook(lambda module, grads, _: scaled(grads))
        return module

    return Case(make_module, lambda: leaf(5, 4))

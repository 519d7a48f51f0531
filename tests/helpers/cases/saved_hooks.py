"""Cases: saved-tensor hooks."""

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from helpers.split import Case, leaf


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4))


def under(hooks):
    def call(module, *inputs):
        with hooks():
            return module(*inputs)

    return call


def everything():
    return nn.Sequential(
        nn.Embedding(11, 4), nn.Conv1d(5, 3, 1), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    )


def layers_under_save_on_cpu() -> Case:
    return Case(network, lambda: leaf(5, 4), under(save_on_cpu))


def sites_under_save_on_cpu() -> Case:
    return Case(everything, lambda: torch.randint(11, (2, 5)), under(save_on_cpu))


def hooks_that_change_what_is_saved() -> Case:
    def hooks():
        return saved_tensors_hooks(
            lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t,
            lambda t: t.to(torch.float64) if t.is_floating_point() else t,
        )

    return Case(network, lambda: leaf(5, 4), under(hooks))


def hooks_around_one_layer() -> Case:
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                x = self.second(x)
            return self.third(x)

    return Case(Partly, lambda: leaf(5, 4))

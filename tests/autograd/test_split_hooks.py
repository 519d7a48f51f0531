"""Hooks in the split backward: as often, and with what, as in plain autograd."""

import pytest
import torch
from torch import nn

from helpers.cases import hooks as cases
from helpers.cases.hooks import Module
from helpers.split import double, float64
from zbpp import backward_input

NAMES = ["linear.weight", "linear.bias", "norm.weight", "norm.bias", "chained"]


def run_plain(module, num_microbatches=2):
    for microbatch in range(num_microbatches):
        module(double(5, 4, seed=microbatch)).backward(double(5, 4, seed=9))


def run_split(module, num_microbatches=2):
    later = []
    for microbatch in range(num_microbatches):
        output = module(double(5, 4, seed=microbatch))
        later.append(backward_input(output, double(5, 4, seed=9), ())[1])
    for weight_grads in later:
        weight_grads.accumulate()


def both(prepare):
    """What prepare(module) recorded, in a plain and in a split backward."""
    found = []
    for run in (run_plain, run_split):
        with float64():
            torch.manual_seed(0)
            module = Module()
        found.append(prepare(module))
        run(module)
    return found


# ---------------------------------------------------------------- tensor hooks on leaves


def test_a_leafs_hook_sees_each_microbatchs_whole_gradient():
    def prepare(module):
        seen = {name: [] for name in NAMES}
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda grad, name=name: seen[name].append(grad.clone()))
        return seen

    plain, split = both(prepare)
    for name in NAMES:
        assert len(plain[name]) == len(split[name]) == 2
        for expected, found in zip(plain[name], split[name], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- hooks on intermediate tensors


def test_a_hook_on_an_activation_changes_dy_as_in_plain_autograd():
    """dy is captured after the hooks on the site's output."""
    seen = []
    facts = cases.hooks_on_activations(seen=seen).compare()
    assert {"first.weight", "second.weight"} <= facts.deferred
    plain, split = seen[:4], seen[4:]
    assert len(split) == 4
    assert all(torch.equal(*pair) for pair in zip(plain, split, strict=True))


# ---------------------------------------------------------------- post-accumulate-grad hooks


def test_post_accumulate_hooks_fire_once_per_microbatch_with_the_sum_so_far():
    def prepare(module):
        seen = {name: [] for name in NAMES}
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, name=name: seen[name].append(parameter.grad.clone())
            )
        return seen

    plain, split = both(prepare)
    for name in NAMES:
        assert len(plain[name]) == len(split[name]) == 2
        for expected, found in zip(plain[name], split[name], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_post_accumulate_hooks_fire_in_w_and_in_the_order_of_the_backward():
    """Deepest layer last, as in plain autograd: data parallelism sends in that order."""

    def prepare(module):
        order = []
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: order.append(name))
        return order

    orders = []
    for run in (run_plain, run_split):
        module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5))).double()
        orders.append(prepare(module))
        run(module, num_microbatches=1)
    assert orders[0] == orders[1] == [f"{i}.weight" for i in (4, 3, 2, 1, 0)]


def test_post_accumulate_hooks_may_take_the_gradient_away():
    """An optimizer step in the backward: `.grad` is None again afterwards."""
    norms = []

    def hook(parameter):
        norms.append(parameter.grad.norm().item())
        parameter.grad = None

    module = Module().double()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    run_plain(module)
    run_split(module)
    half = len(norms) // 2
    assert half == 2 * len(NAMES)
    assert sorted(norms[:half]) == pytest.approx(sorted(norms[half:]), rel=1e-9)
    assert all(parameter.grad is None for parameter in module.parameters())

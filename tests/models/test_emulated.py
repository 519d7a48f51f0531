"""Emulated stages: who sleeps when, with the clock replaced by a list."""

import time

import pytest
import torch
from torch.autograd.graph import GradientEdge

from zbpp.models.emulated import Emulated


@pytest.fixture
def naps(monkeypatch):
    """The milliseconds slept, in order."""
    slept = []
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(round(seconds * 1000, 6)))
    return slept


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def stage(index=0, num_stages=1, f=1, b=2, w=3, num_layers=None):
    return Emulated(num_layers=num_layers or num_stages, f=f, b=b, w=w).build_stage(index, num_stages)


def test_forward_sleeps_without_autograd(naps):
    with torch.no_grad():
        stage()(drawn(4, 8))
    assert naps == [1]


def test_a_whole_backward_sleeps_b_and_w(naps):
    stage()(drawn(4, 8).requires_grad_()).sum().backward()
    assert naps == [1, 2, 3]


def linear_node(y):
    """The matrix product below the output's sleeping identity."""
    (edge,) = y.grad_fn.next_functions
    return edge[0]


@pytest.mark.parametrize("needs_grad", [True, False])
def test_b_and_w_are_separate_on_every_stage(naps, needs_grad):
    """As the split backward takes them: B up to the matrix product, W from there to the weight."""
    model, x = stage(), drawn(4, 8).requires_grad_(needs_grad)
    y = model(x)
    site = GradientEdge(linear_node(y), 0)
    (dy,) = torch.autograd.grad(y.sum(), site, retain_graph=True)
    assert naps == [1, 2]
    (weight_grad,) = torch.autograd.grad([site], list(model.parameters()), dy)
    assert naps == [1, 2, 3]
    torch.testing.assert_close(weight_grad, torch.ones(4, 8).T @ x.detach())


def test_the_gradients_are_those_of_the_linear_layer(naps):
    model, x = stage(), drawn(4, 8).requires_grad_()
    (weight,) = model.parameters()
    grads = torch.autograd.grad(model(x).square().sum(), (x, weight))
    expected = torch.autograd.grad((x @ weight.T).square().sum(), (x, weight))
    assert [torch.equal(one, other) for one, other in zip(grads, expected, strict=True)] == [True, True]


def test_times_may_differ_per_layer(naps):
    for index in range(3):
        stage(index, 3, f=[1, 2.5, 3], b=4, w=(5, 6, 7))(drawn(4, 8)).sum().backward()
    assert naps == [1, 4, 5, 2.5, 4, 6, 3, 4, 7]

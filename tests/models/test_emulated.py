"""Emulated stages: who sleeps when, with the clock replaced by a list."""

import time

import pytest
import torch
from torch.autograd.graph import GradientEdge

from zbpp.models.emulated import Emulated
from zbpp.stage_api import PipelineModel


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


def test_an_emulated_model_is_marked_as_emulated():
    assert Emulated.emulated is True
    assert "EMULATED" in Emulated.__doc__
    assert isinstance(Emulated(num_layers=1, f=1, b=1, w=1), PipelineModel)


def test_forward_sleeps_f_only(naps):
    stage()(drawn(4, 8))
    assert naps == [1]


def test_forward_sleeps_without_autograd(naps):
    with torch.no_grad():
        stage()(drawn(4, 8))
    assert naps == [1]


def test_the_input_gradient_alone_sleeps_b_only(naps):
    x = drawn(4, 8).requires_grad_()
    torch.autograd.grad(stage()(x).sum(), x)
    assert naps == [1, 2]


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


def test_a_real_sleep_is_as_long_as_it_says():
    start = time.perf_counter()
    stage(f=20)(drawn(4, 8))
    assert time.perf_counter() - start >= 0.020


def test_loss_is_the_mean_square():
    loss = Emulated(num_layers=1, f=1, b=1, w=1).loss(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 2.0]]))
    assert loss.item() == 2.0


def test_weights_and_names_differ_per_stage_and_do_not_depend_on_their_number():
    names = [next(stage(index, 3).named_parameters())[0] for index in range(3)]
    assert names == ["layer_0.weight", "layer_1.weight", "layer_2.weight"]
    one, other, same = (next(stage(*at, num_layers=3).parameters()) for at in [(0, 3), (1, 3), (0, 2)])
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_list_of_another_length_is_refused():
    with pytest.raises(
        ValueError, match=r"f=\[1, 2\] has 2 times for 3 layers: write one number for all, or 3"
    ):
        stage(0, 3, f=[1, 2])


@pytest.mark.parametrize("b", [-1, [1, -2], float("inf"), float("nan")])
def test_a_negative_or_infinite_time_is_refused(b):
    with pytest.raises(ValueError, match="holds a negative or infinite time: write milliseconds"):
        Emulated(num_layers=2, f=1, b=b, w=1)

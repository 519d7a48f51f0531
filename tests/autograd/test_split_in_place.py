"""In-place changes of what W reads: the gradients of plain autograd, or an error that names the tensor."""

import pytest
import torch
from torch import nn

from helpers.cases.functions import Deferring
from helpers.split import assert_close, double, float64, grads_of, leaf
from zbpp import backward_input
from zbpp.autograd.weight_grads import ChangedInPlace


class Writes(nn.Module):
    """Computes the input of its layer into memory that it keeps."""

    def __init__(self, kind):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.kept = torch.zeros(5, dtype=torch.long) if kind == "embedding" else torch.empty(5, 4)
        self.layer = {
            "linear": lambda: nn.Linear(4, 4),
            "convolution": lambda: nn.Conv1d(5, 5, 1),
            "embedding": lambda: nn.Embedding(4, 4),
        }[kind]()

    def forward(self, x):
        if self.kept.dtype == torch.long:
            torch.argmax(x, -1, out=self.kept)
        else:
            torch.tanh(x.detach(), out=self.kept)
        return self.first(x) + self.layer(self.kept)


NODES = {"linear": "AddmmBackward0", "convolution": "ConvolutionBackward0", "embedding": "EmbeddingBackward0"}


@pytest.mark.parametrize("kind", NODES)
def test_a_buffer_that_the_next_forward_writes_into_before_w_is_noticed(kind):
    """F0 B0 F1 W0: W0 would have read what F1 wrote."""
    with float64():
        module = Writes(kind)
    _, early = backward_input(module(double(5, 4)), double(5, 4, seed=1), ())
    module(double(5, 4, seed=2))
    with pytest.raises(RuntimeError, match=rf"the input that {NODES[kind]} saved .*changed in place.*clone"):
        early.accumulate()


def changed_before_w(make_output, change):
    """The error of W after change(dy, gradient of the input); `.grad` has nothing of the changed tensors."""
    with float64():
        x = leaf(5, 4)
        output = make_output(x)
        dy = torch.randn_like(output)
        (grad,), weight_grads = backward_input(output, dy, x)
        change(dy, grad)
        with pytest.raises(ChangedInPlace, match="changed in place") as caught:
            weight_grads.accumulate()
    return str(caught.value)


def test_a_change_of_the_callers_gradient_before_w_is_noticed():
    with float64():
        layer = nn.Linear(4, 3)
    message = changed_before_w(layer, lambda dy, grad: dy.mul_(2))
    assert "dy, the gradient of AddmmBackward0's output, of shape (5, 3)" in message
    assert "a weight of shape (3,)" in message or "a weight of shape (3, 4)" in message
    assert grads_of(layer) == {}


def test_a_change_of_a_returned_gradient_that_is_dy_is_noticed():
    """Adding hands dy on: what the input gets IS what the layer got."""
    with float64():
        layer = nn.Linear(4, 4)
    assert "dy, the gradient of" in changed_before_w(
        lambda x: x + layer(x.detach()), lambda dy, grad: grad.add_(1)
    )


def test_a_change_of_a_gradient_that_b_computed_is_noticed():
    """That of a parameter which is added IS dy."""
    with float64():
        offset = nn.Parameter(torch.randn(5, 4))
    message = changed_before_w(lambda x: torch.tanh(x) + offset, lambda dy, grad: dy.zero_())
    assert "the gradient that B computed" in message


def test_a_change_of_a_tensor_passed_to_defer_is_noticed():
    with float64():
        weight = nn.Parameter(torch.randn(3, 4))
    message = changed_before_w(lambda x: Deferring.apply(x, weight), lambda dy, grad: dy.zero_())
    assert "passed to defer" in message


def test_a_change_of_a_tensor_saved_on_the_cpu_is_noticed():
    """save_on_cpu hands a tensor on that is on the CPU already."""
    with float64():
        layer, x = nn.Linear(4, 3), torch.randn(5, 4)
        with torch.autograd.graph.save_on_cpu():
            output = layer(x)
        _, weight_grads = backward_input(output, torch.randn(5, 3), ())
    x.add_(1)
    with pytest.raises(RuntimeError, match="the input that AddmmBackward0 saved"):
        weight_grads.accumulate()


# ---------------------------------------------------------------- within B's own pass


class Scales(torch.autograd.Function):
    """Changes its gradient in place, which autograd forbids and does not check."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(0.1)


class Beside(nn.Module):
    """The two paths that `order` joins get one gradient; the second one's nodes run first in backward."""

    def __init__(self, path, order):
        super().__init__()
        self.inner, self.layer, self.offset = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Parameter(torch.randn(5, 4)),
        )
        self.path, self.order = path, order

    def forward(self, x):
        return self.order(self, x)

    def scaled(self, x):
        h = self.inner(x)
        if self.path == "function":
            return Scales.apply(h)
        h = h * 1
        h.register_hook(lambda grad: grad.mul_(0.1))
        return h


@pytest.mark.parametrize("path", ["function", "hook"])
@pytest.mark.parametrize("needs_grad", [True, False], ids=["inner stage", "stage 0"])
@pytest.mark.parametrize("beside", ["layer", "offset"])
def test_a_backward_that_changes_a_captured_gradient_in_place_is_refused(path, needs_grad, beside):
    """Plain autograd has computed the other path's weight gradient by then."""
    orders = {
        "layer": lambda self, x: self.scaled(x) + self.layer(x),
        "offset": lambda self, x: self.scaled(x) + self.offset,
    }
    with float64():
        module = Beside(path, orders[beside])
    x = double(5, 4).requires_grad_(needs_grad)
    match = r"changes a gradient of shape \(5, 4\) in place.*return a new tensor"
    with pytest.raises(ChangedInPlace, match="Scales.*" + match if path == "function" else match):
        backward_input(module(x), double(5, 4, seed=1), ())
    assert grads_of(module) == {}


# ---------------------------------------------------------------- frozen in between


@pytest.mark.parametrize("frozen", ["0.weight", "1.weight", "2.weight"])
def test_a_parameter_frozen_between_f_and_b_gets_no_gradient(frozen):
    """Autograd passes over it; a deferred weight, a computed one, a bias whose weight waits."""
    with float64():
        module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        plain = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    plain.load_state_dict(module.state_dict())
    x, dy = double(5, 4), double(5, 4, seed=1)
    outputs = module(x), plain(x)
    for each in (module, plain):
        each.get_parameter(frozen).requires_grad_(False)
    backward_input(outputs[0], dy, ())[1].accumulate()
    outputs[1].backward(dy)
    assert grads_of(plain).keys() == dict(plain.named_parameters()).keys() - {frozen}
    assert_close(grads_of(module), grads_of(plain))

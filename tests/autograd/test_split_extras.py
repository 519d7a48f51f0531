"""What the split offers to extras: a mark for packed tensors, a registry for subclasses of Tensor."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor

from helpers.split import double
from zbpp import backward_input
from zbpp.autograd import rules
from zbpp.autograd.arguments import roots_and_grads
from zbpp.autograd.capture import unpack
from zbpp.autograd.split import split


class InList:
    """A tensor packed as a list of numbers."""

    def __init__(self, tensor, *, stays, unpacked):
        self.alias, self.numbers = tensor.detach(), tensor.tolist()
        self.stays, self.unpacked = stays, unpacked

    @property
    def _version(self):
        return self.alias._version

    def check(self):
        pass

    def unpack(self):
        self.unpacked.append(self.alias.shape)
        return self.alias if self.stays else torch.tensor(self.numbers, dtype=self.alias.dtype)

    def tensors(self):
        return [self.alias]


@pytest.mark.parametrize("stays", [False, True])
def test_a_weight_waits_whose_x_is_packed_and_marked_by_the_unpack_hook(stays):
    """W unpacks it; if it stays, B takes the tensor itself, as from a node whose tensors nobody packed."""
    layer, unpacked = nn.Linear(4, 3, dtype=torch.double), []
    x, dy = double(5, 4), double(5, 3, seed=1)
    layer(x).backward(dy)
    expected, layer.weight.grad = layer.weight.grad, None
    with saved_tensors_hooks(lambda tensor: InList(tensor, stays=stays, unpacked=unpacked), unpack):
        output = layer(x)
    _, weight_grads = backward_input(output, dy, ())
    assert unpacked == [x.shape] * stays
    assert [type(task).__name__ for task in weight_grads._tasks] == ["UseTask", "UseTask"]
    weight_grads.accumulate()
    assert unpacked == [x.shape]
    assert torch.equal(layer.weight.grad, expected)


def test_weights_of_a_subclass_wait_once_it_is_registered(monkeypatch):
    monkeypatch.setattr(rules, "_SUBCLASSES", [*rules._SUBCLASSES])
    gradients = []
    for task in ("ComputedTask", "SumTask"):
        weight = TwoTensor(double(4, 3), double(4, 3, seed=1)).requires_grad_()
        x = TwoTensor(double(5, 4, seed=2), double(5, 4, seed=3))
        output = x @ weight
        _, weight_grads = backward_input(output, output.detach().clone(), ())
        assert [type(each).__name__ for each in weight_grads._tasks] == [task]
        weight_grads.accumulate()
        gradients.append(weight.grad)
        rules.register_subclass(
            lambda node, rule, operand, leaf, views: (
                rule.capture(node, operand) if isinstance(leaf, TwoTensor) else None
            )
        )
    assert torch.equal(gradients[0].a, gradients[1].a)
    assert torch.equal(gradients[0].b, gradients[1].b)


@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_that_the_pass_adds_at_once_are_those_of_the_given_parameters_alone(at_once):
    x, scale, other = (double(4, seed=seed).requires_grad_() for seed in range(3))
    roots, root_grads = roots_and_grads((x * scale * other).sum(), None)
    _, tasks, _ = split(roots, root_grads, (x,), {id(scale)}, is_hooked=False, at_once=at_once)
    assert (scale.grad is not None) == at_once
    for each in tasks:
        each.accumulate()
    assert torch.equal(scale.grad, (x * other).detach())
    assert other.grad is None

"""Hooks on parameters: every kind, wherever the parameter is used, called as in a plain backward."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from helpers.leaf_hooks import KINDS, Seen, assert_same, assert_same_calls, total_of
from helpers.split import Waits, double, float64
from zbpp import backward_input, checkpoint
from zbpp.autograd import hooks
from zbpp.autograd.compiled import compile_stage
from zbpp.autograd.hooked_leaves import give_to_leaves

M = 2


def plainly(fn, x):
    return fn(x)


def reentrant(fn, x):
    return torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=True)


class Repeats(torch.autograd.Function):
    """A library's reentrant checkpoint: like torch's, it refuses to run inside of .grad()."""

    @staticmethod
    def forward(ctx, fn, x):
        ctx.fn = fn
        ctx.save_for_backward(x)
        return fn(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("not compatible with .grad()")
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.fn(x)
        torch.autograd.backward(y, dy)
        return None, x.grad


class DropsGradient(torch.autograd.Function):
    """Gives its weight no gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class Net(nn.Module):
    """One parameter, or one layer, and how it is used."""

    def __init__(self, use, how=plainly):
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.use, self.how = use, how

    def forward(self, x):
        return self.use(self, torch.tanh(x))


def once(net, x):
    return net.layer(x) * net.weight


def block(net, x):
    return net.how(lambda x: torch.tanh(net.layer(x)) * net.weight, x)


# {name: (use, how in the split, how in the plain backward)}. Torch runs the hooks of a reentrant checkpoint's
# parameters once per checkpoint; zbpp as if there were no checkpoint.
USES = {
    "waits for W, and computed in B": (once, plainly),
    "twice at sites": (lambda net, x: net.layer(torch.tanh(net.layer(x))) * net.weight, plainly),
    "at a site, and computed in B": (lambda net, x: net.layer(x) + net.layer.weight.sum(0), plainly),
    "through a chain that computes": (lambda net, x: F.linear(x, net.layer.weight * 2) * net.weight, plainly),
    "a Function defers it": (lambda net, x: Waits.apply(net.layer(x), net.weight), plainly),
    "gets no gradient": (lambda net, x: DropsGradient.apply(net.layer(x), net.weight), plainly),
    "in a checkpoint": (block, checkpoint),
    "in a checkpoint and outside": (lambda net, x: block(net, net.layer(x)) * net.weight, checkpoint),
    "in two checkpoints": (lambda net, x: block(net, block(net, x)), checkpoint),
    "in a checkpoint of checkpoints": (
        lambda net, x: checkpoint(lambda x: block(net, x), x) if net.how is checkpoint else block(net, x),
        checkpoint,
    ),
    "in a reentrant checkpoint": (lambda net, x: block(net, net.layer(x)), reentrant),
    "in a library's checkpoint": (lambda net, x: block(net, net.layer(x)), Repeats.apply),
    "compiled": (once, "compiled"),
}


COMPILED = {("several", False), ("several", True), ("node prehook", False), ("any", False)}  # others: seconds


def run(kind, use, how, *, has_main_grad):
    """(the calls of hooks, the gradients of inputs, the sums of the parameters' gradients)."""
    torch.manual_seed(0)
    with float64():
        net = Net(use, plainly if how == "compiled" else how or plainly)
        seen = Seen()
        if how == "compiled":
            compile_stage(net, backend="eager")
    seen.register(kind, net)
    if has_main_grad:
        for parameter in net.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
    inputs = [double(5, 4, seed=microbatch).requires_grad_() for microbatch in range(M)]
    outputs = [net(x) for x in inputs]
    grads, later = [], []
    for x, output in zip(inputs, outputs, strict=True):
        if how is None:
            output.backward(double(5, 4, seed=9))
            grads.append(x.grad)
        else:
            (grad,), weight_grads = backward_input(output, double(5, 4, seed=9), [x])
            grads.append(grad)
            later.append(weight_grads)
    for weight_grads in later:
        weight_grads.accumulate()
    if has_main_grad:
        assert all(parameter.grad is None for parameter in net.parameters())
    return seen.calls, grads, [total_of(parameter) for parameter in net.parameters()]


@pytest.mark.parametrize("name", USES)
def test_hooks_of_parameters_run_as_in_a_plain_backward(name):
    """Every kind of hook, with and without a main_grad: as often, with the same values, same gradients."""
    use, how = USES[name]
    for kind, has_main_grad in itertools.product(KINDS, (False, True)):
        if how == "compiled" and (kind, has_main_grad) not in COMPILED:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = run(kind, use, None, has_main_grad=False)
            found = run(kind, use, how, has_main_grad=has_main_grad)
        try:
            assert_same_calls(found[0], expected[0], kind, has_main_grad=has_main_grad)
            assert_same(found[1], expected[1])
            assert_same(found[2], expected[2], has_main_grad=has_main_grad)
        except AssertionError as error:
            error.add_note(f"{kind}, main_grad: {has_main_grad}")
            raise


def test_a_multi_grad_hook_over_a_parameter_and_an_activation_is_refused():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    y = layer(x)
    register_multi_grad_hook([layer.weight, y], lambda grads: None)
    with pytest.raises(ValueError, match="a parameter and a tensor that was computed"):
        backward_input(torch.tanh(y).sum(), None, [x])


LAYER = nn.Linear(4, 4)


def test_a_reentrant_checkpoint_adds_to_the_main_grad_of_a_global_module():
    """The gradient went to .grad. Torch's checkpoint holds a function, which has the module as a global."""
    weight, x = LAYER.weight, torch.randn(2, 4, requires_grad=True)
    weight.main_grad = torch.zeros(4, 4, dtype=torch.float64)
    y = reentrant(lambda x: torch.tanh(LAYER(x)), x)
    backward_input(y.sum(), None, [x])[1].accumulate()
    (expected,) = torch.autograd.grad(torch.tanh(LAYER(x)).sum(), weight)
    torch.testing.assert_close(weight.main_grad, expected.double())
    assert weight.grad is None


def test_a_module_without_hooks_is_searched_for_hooks_once(monkeypatch):
    """Until somebody in the process registers another hook."""
    layer, x, looked = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True), []
    look = hooks.has_own_hooks
    monkeypatch.setattr(hooks, "has_own_hooks", lambda leaf: looked.append(leaf) or look(leaf))

    def step():
        before = len(looked)
        backward_input(layer(x).sum(), None, [x])[1].accumulate()
        return len(looked) - before

    assert [step(), step(), step()] == [2, 0, 0]
    calls = []
    handle = nn.Parameter(torch.ones(1)).register_hook(lambda grad: grad)
    layer.bias.register_hook(calls.append)
    assert [step(), step(), len(calls)] == [2, 1, 2]
    handle.remove()


def test_an_empty_parameter_that_was_not_asked_for_gets_no_gradient_and_no_hook():
    """An empty leaf may be the dummy of a checkpoint, so the pass goes there."""
    layer, empty, calls = nn.Linear(4, 4), nn.Parameter(torch.empty(0)), []
    empty.register_hook(calls.append)
    y = torch.cat([checkpoint(layer, torch.ones(2, 4)).flatten(), empty * 2])
    backward_input(y.sum(), None, (), [layer.weight])[1].accumulate()
    assert layer.weight.grad is not None
    assert (empty.grad, layer.bias.grad, calls) == (None, None, [])


def test_a_gradient_that_nobody_else_holds_becomes_the_leafs_without_a_copy():
    leaves = [torch.ones(3, requires_grad=True) for _ in range(3)]
    nodes = [torch.autograd.graph.get_gradient_edge(each).node for each in leaves]
    leaves[1].requires_grad_(False)  # frozen since B
    gradients = [torch.full((3,), float(i)) for i in range(3)]
    places = [each.data_ptr() for each in gradients]
    give_to_leaves(nodes, gradients)
    assert not gradients
    assert leaves[1].grad is None
    for i in (0, 2):
        assert leaves[i].grad.tolist() == [i] * 3
        assert leaves[i].grad.data_ptr() == places[i]

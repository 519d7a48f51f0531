"""A recompute finds what the forward found, or says that it can't; what it is attached to may be copied."""

from functools import partial

import pytest
import torch
from torch import nn

from helpers.split import (
    CountCalls,
    Waits,
    assert_close,
    assert_equals_plain,
    double,
    float64,
    grads_of,
    leaf,
)
from zbpp import backward_input, checkpoint
from zbpp.autograd import defer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

    def twice(self, x):
        return self(self(x))


def made(make=Block):
    with float64():
        torch.manual_seed(0)
        return make()


WAYS = {
    "a module": lambda block: block,
    "a method": lambda block: block.twice,
    "a closure": lambda block: lambda x: block(x),
    "arguments bound": lambda block: partial(lambda block, x: block(x), block),
    "layers in a list": lambda block: partial(
        lambda layers, x: layers[1](layers[0](x)), [block.up, block.down]
    ),
    "a weight among bound arguments": lambda block: partial(
        lambda weights, x: torch.tanh(x @ weights[0]), [block.down.weight]
    ),
}


def plain_backward(output):
    output.backward(double(*output.shape, seed=1))


def split_backward(output):
    backward_input(output, double(*output.shape, seed=1), ())[1].accumulate()


@pytest.mark.parametrize("backward", [plain_backward, split_backward])
def test_a_checkpoint_may_return_a_tensor_of_outside(backward):
    """The tensor got the checkpoint as its grad_fn, whose backward then ran for ever."""
    block = made()
    weight = block.up.weight
    output = checkpoint(lambda x: weight, double(5, 4))
    assert weight.is_leaf
    backward(output)
    assert torch.equal(weight.grad, double(8, 4, seed=1))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_function_that_changes_its_argument_in_place_is_refused(needs_grad):
    """A batch that the first block changes, say: the recompute would change it twice."""
    block = made()
    x = double(5, 4).requires_grad_(needs_grad).clone()
    with pytest.raises(RuntimeError, match=r"changes its argument of shape \(5, 4\) in place.*\(x = x \* 3"):
        checkpoint(lambda x: block(x.mul_(3)), x)
    x = double(5, 4).requires_grad_(needs_grad).clone()
    output = checkpoint(lambda x: block(x.clone().mul_(3)), x)
    split_backward(output)
    found = grads_of(block)
    block.zero_grad()
    plain_backward(block(x * 3))
    assert_close(found, grads_of(block))


@pytest.mark.parametrize("backward", [plain_backward, split_backward])
@pytest.mark.parametrize("way", WAYS)
def test_a_change_of_a_weight_between_f_and_its_recompute_is_noticed(way, backward):
    """As autograd refuses to go on without a checkpoint."""
    block = made()
    function = WAYS[way](block)
    for how in (lambda function, x: function(x), checkpoint):
        output = how(function, leaf(5, 4).double())
        with torch.no_grad():
            block.down.weight.mul_(1.5)
        with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
            backward(output)
    assert grads_of(block).keys() <= {"down.bias"}  # the plain one had it before it noticed


# ---------------------------------------------------------------- buffers


class Normed(nn.Module):
    """A batch norm, which updates its buffers in forward, and a layer whose output depends on them."""

    def __init__(self, how):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("calls", torch.zeros(()))
        self.how = how

    def forward(self, x):
        return self.how(self.run, self.first(x))

    def run(self, x):
        self.calls = self.calls + 1
        return self.spectral(self.norm(x)) * self.calls


def plainly(function, *args):
    return function(*args)


def test_a_batch_norm_under_recompute_counts_once():
    """F0 F1 B0 B1: buffers end as without a checkpoint, and each recompute sees what its forward saw."""
    found = assert_equals_plain(lambda: Normed(checkpoint), lambda: leaf(5, 4))
    expected = assert_equals_plain(lambda: Normed(plainly), lambda: leaf(5, 4))
    assert_close(found.grads, expected.grads)
    module, plain = made(lambda: Normed(checkpoint)), made(lambda: Normed(plainly))
    buffers = dict(module.named_buffers())
    for seed in range(2):
        plain_backward(module(double(5, 4, seed=seed)))
        plain_backward(plain(double(5, 4, seed=seed)))
    assert module.norm.num_batches_tracked == module.calls == 2
    assert_close(dict(module.named_buffers()), dict(plain.named_buffers()), 0.0)
    assert module.norm.running_mean is buffers["norm.running_mean"]


class Moving(nn.Module):
    """Its output depends on a moving average of its activations, which forward replaces: a codebook, say."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        h = self.layer(x)
        self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
        return (h - self.mean).square()


def test_a_forward_may_use_and_replace_a_moving_average():
    sides = []
    for how in (plainly, checkpoint):
        module = made(Moving)
        outputs = [how(module, double(5, 4, seed=microbatch)) for microbatch in range(2)]
        for output in outputs:
            split_backward(output)
        sides.append(grads_of(module) | {"mean": module.mean})
    assert_close(*sides)


# ---------------------------------------------------------------- hooks


class Tied(nn.Module):
    """A weight that is used inside a checkpoint and outside of it."""

    def __init__(self, how):
        super().__init__()
        self.block, self.how = Block(), how

    def forward(self, x):
        return self.block(self.how(self.block, self.block(x)))


@pytest.mark.parametrize("backward", [plain_backward, split_backward])
def test_post_accumulate_hooks_fire_once_for_a_weight_inside_and_outside_a_checkpoint(backward):
    module, plain = made(lambda: Tied(checkpoint)), made(lambda: Tied(plainly))
    counts, totals = {}, {}
    for name, parameter in module.named_parameters():
        counts[name] = CountCalls()
        parameter.register_post_accumulate_grad_hook(counts[name])
        parameter.register_post_accumulate_grad_hook(
            lambda leaf, name=name: totals.update({name: leaf.grad.clone()})
        )
    for microbatch in range(2):
        backward(module(double(5, 4, seed=microbatch)))
        plain_backward(plain(double(5, 4, seed=microbatch)))
        assert {name: count.number for name, count in counts.items()} == dict.fromkeys(counts, microbatch + 1)
        assert_close(totals, grads_of(plain))  # each hook saw the whole sum
        assert_close(grads_of(module), grads_of(plain))


def checkpoint_in_checkpoint(fn, x):
    return checkpoint(lambda x: checkpoint(fn, x), x)


@pytest.mark.parametrize("backward", [plain_backward, split_backward])
@pytest.mark.parametrize("how", [checkpoint, checkpoint_in_checkpoint])
@pytest.mark.parametrize("has_others", [False, True])
def test_a_tensor_hook_sees_the_sum_over_checkpoints_and_other_uses_once(backward, how, has_others):
    """It saw the part of each checkpoint, twice or as None if the weight had a post-accumulate hook, too."""
    module, plain = made(lambda: Tied(how)), made(lambda: Tied(plainly))
    count = CountCalls()
    for parameter in (*module.parameters(), *plain.parameters()):
        parameter.register_hook(lambda grad: 2 * grad.clamp(-0.5, 0.5))
        if has_others:
            parameter.register_post_accumulate_grad_hook(count)
    for microbatch in range(2):
        backward(module(double(5, 4, seed=microbatch)))
        plain_backward(plain(double(5, 4, seed=microbatch)))
    assert_close(grads_of(module), grads_of(plain))
    assert count.number == (2 * 2 * 4 if has_others else 0)


class _KeepsAttributes(torch.autograd.Function):
    """Scale by a weight that waits for W; nothing of it is freed by a pass."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = x.detach(), weight
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.kept
        return dy * weight.detach(), defer(ctx, weight, lambda dy, x: (dy * x).sum(0), dy, x)


def _closed_over(function):
    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    scaled = function.apply(x, weight)
    return x, weight, scaled + checkpoint(lambda z: z.sin() * 2 + scaled, x)


def test_function_behind_a_closed_over_tensor_waits_in_both_passes():
    x, weight, y = _closed_over(_KeepsAttributes)
    (grad,), weight_grads = backward_input(y, torch.ones_like(y), [x])
    weight_grads.accumulate()
    expected_x = 2 * weight + 2 * x.cos()
    assert torch.allclose(grad, expected_x, rtol=1e-12, atol=1e-12)
    assert torch.allclose(weight.grad, 2 * x.sum(0), rtol=1e-12, atol=1e-12)


def test_freed_function_behind_a_closed_over_tensor_is_refused_in_words():
    x, _, y = _closed_over(Waits)
    with pytest.raises(RuntimeError, match="pass that tensor as an argument"):
        backward_input(y, torch.ones_like(y), [x])

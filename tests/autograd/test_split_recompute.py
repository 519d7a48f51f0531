"""A recompute finds what the forward found, or says that it can't; what it is attached to may be copied."""

import copy
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from helpers.split import CountCalls, assert_close, assert_equals_plain, double, float64, grads_of, leaf
from zbpp import auxiliary_loss, auxiliary_losses, backward_input, checkpoint
from zbpp.autograd import recompute
from zbpp.benchmark.interleaved_timing import without_garbage_collection


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
def test_a_change_of_an_argument_between_f_and_its_recompute_is_noticed(backward):
    x = double(5, 4)
    output = checkpoint(made(), x)
    x.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(output)


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


class Lazy(Moving):
    """Its forward makes the average in the first microbatch: of None, or of no buffer at all."""

    def __init__(self, is_registered):
        super().__init__()
        del self.mean
        if is_registered:
            self.register_buffer("mean", None)

    def forward(self, x):
        if getattr(self, "mean", None) is None:
            self.register_buffer("mean", self.layer(x).detach().mean(0))
        elif float(self.mean[0]) == 0.0:
            del self.mean  # a buffer may go, too
            return self.layer(x)
        return super().forward(x)


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_forward_may_make_its_buffer_when_it_is_needed_first(is_registered):
    """The recompute of the first microbatch found the buffer, and computed with it."""
    sides = []
    for how in (plainly, checkpoint):
        module = made(lambda: Lazy(is_registered))
        outputs = [how(module, double(5, 4, seed=microbatch)) for microbatch in range(2)]
        assert "mean" in dict(module.named_buffers())
        for output in outputs:
            split_backward(output)
        sides.append(grads_of(module) | {"mean": module.mean})
        module.mean = torch.zeros(4)
        split_backward(how(module, double(5, 4)))
        assert "mean" not in dict(module.named_buffers())
        sides[-1] |= {f"{name} without it": grad for name, grad in grads_of(module).items()}
    assert_close(*sides)


class Queue(nn.Module):
    """Its forward reads a large buffer and then writes into it."""

    def __init__(self, is_written):
        super().__init__()
        self.layer, self.is_written = nn.Linear(4, 4), is_written
        self.register_buffer("queue", torch.ones(4096, 4))

    def forward(self, x):
        y = self.layer(x) * self.queue.mean(0)
        if self.is_written:
            self.queue[: len(x)] = x.detach()
        return y


def test_a_large_buffer_that_changes_is_an_error():
    output = checkpoint(made(lambda: Queue(is_written=True)), double(5, 4))
    with pytest.raises(RuntimeError, match=r"buffer of shape \(4096, 4\) was changed in place"):
        split_backward(output)


# ---------------------------------------------------------------- recompute(module)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_recomputed_module_trains_its_own_weights(duplicate):
    plain, module = made(), made()
    recompute(module)
    copied = duplicate(nn.Sequential(module))[0]
    plain_backward(plain(double(5, 4)))
    split_backward(copied(double(5, 4)))
    assert grads_of(module) == {}
    assert_close(grads_of(copied), grads_of(plain))


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


# ---- A forward that asks whether gradients are on


class Branches(nn.Linear):
    """Computes something else without gradients."""

    def forward(self, x):
        return 2 * super().forward(x) if torch.is_grad_enabled() else super().forward(x)


class Penalized(Block):
    """Reports a gradient penalty, as docs/split.md has it."""

    def forward(self, x):
        if torch.is_grad_enabled():
            leaf = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(super().forward(leaf).sum(), leaf, create_graph=True)
            auxiliary_loss("penalty", (gradient.norm(dim=1) - 1).square().mean())
        return super().forward(x)


@pytest.mark.parametrize("how", ["block", "stage", "nested"])
@pytest.mark.parametrize("kind", [partial(Branches, 4, 4), Penalized])
def test_a_forward_that_asks_for_gradients_computes_the_same_under_recompute(kind, how):
    plain = made(lambda: nn.Sequential(Block(), kind(), Block()))
    module = copy.deepcopy(plain)
    for each in [*module] * (how != "stage") + [module] * (how != "block"):
        recompute(each)
    found = []
    for each, backward in ((plain, torch.autograd.backward), (module, split_several)):
        with auxiliary_losses() as reported:
            output = each(double(5, 4))
        assert bool(reported) == (kind is Penalized)
        values = [output, *reported.values()]
        backward(values, [double(5, 4, seed=1), *(torch.ones_like(value) for value in reported.values())])
        found.append((output, reported, grads_of(each)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert_close(found[1][2], found[0][2])


def split_several(outputs, gradients):
    backward_input(outputs, gradients, ())[1].accumulate()


class Stores(torch.autograd.Function):
    """Stores a tensor on its node, which then lives as long as the graph."""

    @staticmethod
    def forward(ctx, x, stored):
        ctx.stored = x.exp()
        stored.append(weakref.ref(ctx.stored))
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_f_keeps_no_graph_and_saved_tensor_hooks_do_not_see_it():
    """A node that lives after F would hold activations; offload would move them."""
    stored, packed = [], []
    block, x = made(), double(5, 4).requires_grad_()

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor

    with without_garbage_collection(), saved_tensors_hooks(pack, lambda tensor: tensor):
        output = checkpoint(lambda x: Stores.apply(block(x), stored), x)
        assert [each() for each in stored] == [None]
        assert packed == [x.shape]  # the argument alone
        x.exp()
        assert len(packed) > 1  # the hooks are on again
    output.add_(1)  # an output is no view: it may be changed in place
    split_backward(output)

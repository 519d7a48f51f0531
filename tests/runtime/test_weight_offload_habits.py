"""Offloaded weights: more buffers, checkpoints inside blocks, writes without a trace, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zbpp import Pipeline
from zbpp.autograd import checkpoint, recompute
from zbpp.builders.stages import offload_weights
from zbpp.config import ConfigError, MemoryConfig
from zbpp.runtime.memory import weight_buffers
from zbpp.runtime.memory.weight_buffers import OffloadError
from zbpp.runtime.memory.weight_offload import OffloadedWeights, offloaded_weights

SIZE = 16


def layers(number=6):
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(number)))


def trained(make, offload=True, num_steps=2, **options):
    """Losses, gradients, and the OffloadedWeights."""
    torch.manual_seed(0)
    stage = make()
    weights = OffloadedWeights({0: stage}, **options) if offload else None
    pipeline = Pipeline({0: stage}, "zb_h1", loss_fn=F.mse_loss, num_microbatches=3)
    losses = []
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for step in range(num_steps):
        x = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        losses += pipeline.step(x, target=x)
        optimizer.step()
    return torch.stack(losses), [each.grad for each in stage.parameters()], weights


def assert_equal(found, expected):
    assert torch.equal(found[0], expected[0])
    pairs = zip(found[1], expected[1], strict=True)
    assert all(one is other or torch.equal(one, other) for one, other in pairs)  # None: unused


def test_a_larger_budget_copies_less_and_all_of_it_once_a_step():
    """A block is a weight and a bias, each rounded up to 256 bytes. A part of the budget is for gradients."""
    one = 4 * SIZE * SIZE + 256
    expected, copies = trained(layers, offload=False), []
    for number in (2, 4, 6, 9):
        found = trained(layers, budget=(number + 1) * one)
        assert_equal(found, expected)
        assert found[2].device_bytes == (min(number, 6) + 1) * one
        copies.append(found[2].num_copies)
    assert copies[0] > copies[1] > copies[2] == copies[3] == 2 * 6


class Inside(nn.Module):
    """A block, part of whose forward is a checkpoint; in it lies another one."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.how = how
        if how == "module":
            recompute(self.second)

    def forward(self, x):
        if self.how == "module":
            return self.third(self.second(self.first(x)).tanh())
        if self.how == "argument":
            return checkpoint(F.linear, self.first(x), self.second.weight, self.second.bias)
        return checkpoint(self.outer, self.first(x))

    def outer(self, x):
        return checkpoint(lambda y: self.third(y).relu(), self.second(x).tanh())


class Scale(torch.autograd.Function):
    """Notes where its weight is in B."""

    @staticmethod
    def forward(ctx, x, weight, seen):
        ctx.save_for_backward(x, weight)
        ctx.seen = seen
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        ctx.seen.append(weight.data_ptr())
        return dy * weight, (dy * x).sum(0), None


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.seen = nn.Parameter(torch.randn(SIZE)), []

    def forward(self, x):
        return Scale.apply(x, self.scale, self.seen)


def test_a_weight_that_is_saved_itself_is_on_the_device_in_b():
    """Autograd keeps a leaf as it is, not a view of it: unpacked, it would be where the leaf is then."""
    stage = nn.Sequential(nn.Linear(SIZE, SIZE), Scaled(), nn.Linear(SIZE, SIZE))
    OffloadedWeights({0: stage})
    home = stage[1].scale.data_ptr()
    pipeline = Pipeline({0: stage}, "zb_h1", loss_fn=F.mse_loss, num_microbatches=2)
    pipeline.step(torch.randn(4, SIZE), target=torch.randn(4, SIZE))
    assert len(stage[1].seen) == 2
    assert home not in stage[1].seen


@pytest.mark.parametrize("how", ["module", "argument", "nested"])
def test_a_checkpoint_inside_a_block_is_recomputed_with_weights_on_the_device(how, monkeypatch):
    """Every linear layer reads its weight from a buffer, in F and in the recompute: never from the host."""

    def make():
        return nn.Sequential(Inside(how), nn.Linear(SIZE, SIZE), Inside(how))

    expected = trained(make, offload=False)
    hosts, read = [], []

    def host_memory(nbytes, device):
        memory = torch.empty(nbytes, dtype=torch.uint8)
        hosts.append((memory.data_ptr(), memory.data_ptr() + nbytes))
        return memory

    def linear(x, weight, bias=None):
        read.append(any(start <= weight.data_ptr() < end for start, end in hosts))
        return before(x, weight, bias)

    before = F.linear
    monkeypatch.setattr(F, "linear", linear)
    monkeypatch.setattr(weight_buffers, "host_memory", host_memory)
    found = trained(make)
    assert len(read) > 2 * 3 * 5  # two steps, three microbatches: the recomputes are among them
    assert not any(read)
    assert_equal(found, expected)


def test_a_stage_that_is_called_directly_sees_writes_through_data():
    stage, x = layers(3), torch.randn(2, SIZE)
    OffloadedWeights({0: stage})
    before = stage(x)
    stage[1].weight.data.mul_(2)
    plain = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))
    plain.load_state_dict(stage.state_dict())
    assert torch.equal(stage(x), plain(x))
    assert not torch.equal(stage(x), before)
    stage[2].weight.data = torch.zeros(SIZE, SIZE)
    assert torch.equal(stage(x), stage[2].bias.expand(2, SIZE))


class Full:
    """A host that has no room from its n-th piece on."""

    def __init__(self, number):
        self.left = number

    def __call__(self, nbytes, device):
        self.left -= 1
        if self.left < 0:
            raise MemoryError("planted")
        return torch.empty(nbytes, dtype=torch.uint8)


def test_a_host_without_room_for_weights_leaves_the_stage_as_it_was(monkeypatch):
    monkeypatch.setattr(weight_buffers, "host_memory", Full(2))
    stage, x = layers(3), torch.randn(2, SIZE)
    before, expected = [each.data_ptr() for each in stage.parameters()], stage(x)
    with pytest.raises(OffloadError, match=r"no room for \d+ more bytes of offloaded weights.*planted"):
        OffloadedWeights({0: stage})
    assert [each.data_ptr() for each in stage.parameters()] == before
    assert torch.equal(stage(x), expected)


def test_a_host_without_room_for_gradients_leaves_none_and_the_next_step_is_whole(monkeypatch):
    expected = trained(lambda: layers(3), offload=False, num_steps=1)
    torch.manual_seed(0)
    stage, host = layers(3), Full(4)
    monkeypatch.setattr(weight_buffers, "host_memory", host)
    OffloadedWeights({0: stage})
    pipeline = Pipeline({0: stage}, "zb_h1", loss_fn=F.mse_loss, num_microbatches=3)
    x = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(0))
    with pytest.raises(OffloadError, match="no room"):
        pipeline.step(x, target=x)
    assert {each.grad for each in stage.parameters()} == {None}
    host.left = 100
    assert torch.equal(torch.stack(pipeline.step(x, target=x)), expected[0])
    assert all(map(torch.equal, [each.grad for each in stage.parameters()], expected[1]))


class View(nn.Linear):
    def __init__(self):
        super().__init__(SIZE, SIZE)
        self.register_buffer("row", self.weight.detach()[0])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (lambda: {0: layers()}, {"budget": float("nan")}, ValueError, "budget=nan: write a number of bytes"),
        (lambda: {0: layers()}, {"budget": "x"}, ValueError, "budget='x': write a number of bytes"),
        (lambda: {0: layers()}, {"device": "meta"}, ValueError, "device=meta has no memory"),
        (layers, {}, TypeError, r"write OffloadedWeights\(\{0: stage\}"),
        (
            lambda: {0: nn.Sequential(View())},
            {},
            ValueError,
            "buffer row of 0 of stage 0 is a view of a weight",
        ),
    ],
)
def test_bad_input_is_refused_in_a_line(arguments, options, error, words):
    with pytest.raises(error, match=words):
        OffloadedWeights(arguments(), **options)


def test_a_stage_is_offloaded_once():
    stage = layers()
    OffloadedWeights({0: stage})
    with pytest.raises(ValueError, match="stage 0 are offloaded already"):
        OffloadedWeights({0: stage})


def test_the_config_names_what_is_wrong_before_anything_runs():
    with pytest.raises(ConfigError, match=r"weights_budget=1.0 is for offloaded weights"):
        MemoryConfig(weights_budget=1.0)


def test_the_config_says_how_many_weights_stay():
    stages = {0: layers()}
    offload_weights(stages, torch.device("cpu"), MemoryConfig(offload_weights=True, weights_budget=1.0))
    assert offloaded_weights(stages.values()).device_bytes == 7 * (4 * SIZE * SIZE + 256)  # all six stay

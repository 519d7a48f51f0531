"""torch_pipelining.doctor: what it measures is so, and it leaves the model as it was."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from helpers.processes import run_ranks
from zbpp import torch_pipelining

WIDTH, ROWS, MICROBATCHES, DEPTH = 64, 64, 4, 6


class Block(nn.Module):
    """Some layers; checkpointed, they run twice."""

    def __init__(self, number, is_checkpointed):
        super().__init__()
        torch.manual_seed(number)
        pairs = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)]
        self.inner = nn.Sequential(*(each for pair in pairs for each in pair))
        self.is_checkpointed = is_checkpointed

    def forward(self, x, mark=""):
        self.mark = mark
        if self.is_checkpointed:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


def diagnosed(rank, name, source, is_checkpointed):
    if source == "installed":
        torch_pipelining.install()
    try:
        return _diagnosed(rank, name, source, is_checkpointed)
    finally:
        torch_pipelining.uninstall()


def _diagnosed(rank, name, source, is_checkpointed):
    kind = getattr(torch_pipelining if source == "zbpp" else pipelining, name)
    mine = [rank] if name == "Schedule1F1B" else [rank, rank + 2]
    blocks = [Block(number, is_checkpointed) for number in mine]
    count = 2 * len(mine)
    stages = [
        pipelining.PipelineStage(block, number, count, torch.device("cpu"))
        for number, block in zip(mine, blocks, strict=True)
    ]
    loss_fn = nn.functional.mse_loss
    schedule = kind(stages[0] if len(mine) == 1 else stages, MICROBATCHES, loss_fn=loss_fn)
    x, y = torch.randn(2, ROWS, WIDTH)
    found = torch_pipelining.doctor(schedule, (x, y), mark="a keyword")
    assert {block.mark for block in blocks} == {"a keyword"}
    assert all(parameter.grad is None for block in blocks for parameter in block.parameters())
    schedule.step(*([x] if rank == 0 else []), target=y if rank == 1 else None)  # it still works
    assert type(schedule) is kind
    return found


@pytest.mark.parametrize("source", ["torch", "zbpp", "installed"])
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])
def test_what_a_microbatch_holds_falls_to_nothing_and_forwards_run_once(name, source):
    first, second = run_ranks(diagnosed, 2, name, source, False)
    assert str(first) == str(second)
    assert first.reason == ""
    assert first.switch in str(first)
    row = 4 * WIDTH * ROWS // MICROBATCHES  # bytes of a tensor between layers
    for measured in (first.on_torch, first.on_zbpp):
        assert {each for blocks in measured.runs.values() for each in blocks.values()} == {1}
        for after_f, after_b, after_w in measured.held.values():
            assert after_f >= 2 * DEPTH * row  # what each layer returns
            assert abs(after_w) <= 2 * row  # messages
            assert after_b >= after_w
        assert 0 <= measured.planned.bubble_rate < 1
        assert measured.planned.timetable.num_microbatches == MICROBATCHES
    if name != "Schedule1F1B":
        assert first.on_zbpp.held[1][1] < first.on_torch.held[1][1]  # torch keeps the graph between B and W


def test_forwards_of_checkpointed_blocks_are_counted_with_their_recomputes():
    found, _ = run_ranks(diagnosed, 2, "Schedule1F1B", "torch", True)
    for measured in (found.on_torch, found.on_zbpp):
        assert measured.runs == {0: {"inner": 2}, 1: {"inner": 2}}
    assert "inner of stage 0 2 times" in str(found)


class LossError(Exception):
    pass


def state_after_an_error(steps_before):
    norm = nn.BatchNorm1d(WIDTH)
    left = [steps_before * MICROBATCHES]

    def loss_fn(output, target):
        left[0] -= 1
        if left[0] < 0:
            raise LossError
        return nn.functional.mse_loss(output, target)

    stage = pipelining.PipelineStage(norm, 0, 1, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    norm.weight.grad = torch.ones(WIDTH)
    with pytest.raises(LossError):
        torch_pipelining.doctor(schedule, tuple(torch.randn(2, ROWS, WIDTH)))
    return *norm.buffers(), norm.weight.grad


@pytest.mark.parametrize("steps_before", [1, 4])  # torch's second step, zbpp's second step
def test_buffers_and_gradients_are_as_they_were_after_a_loss_that_raises(steps_before):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = state_after_an_error(steps_before)
    finally:
        dist.destroy_process_group()
    expected = *nn.BatchNorm1d(WIDTH).buffers(), torch.ones(WIDTH)
    assert all(map(torch.equal, found, expected))


def schedule_with(loss_fn):
    schedule = object.__new__(pipelining.ScheduleGPipe)  # no process group: nothing runs
    schedule._loss_fn = loss_fn
    return schedule


X, INSTEAD = torch.ones(4, 4), ": write doctor(schedule, (*inputs, target), **keywords)"


@pytest.mark.parametrize(
    ("arguments", "keywords", "told"),
    [
        (((X, X), schedule_with(F.mse_loss)), {}, f"a tuple is no schedule of torch's pipelining{INSTEAD}"),
        ((schedule_with(F.mse_loss), X), {}, f"batch is a Tensor{INSTEAD}"),
        ((schedule_with(F.mse_loss), (X,)), {}, f"len(batch)=1{INSTEAD}"),
        ((schedule_with(F.mse_loss), (X,)), {"target": X}, f"the target is a keyword{INSTEAD}"),
        ((schedule_with(None), (X, X)), {}, "ScheduleGPipe has no loss: make it with loss_fn=..."),
    ],
)
def test_other_arguments_are_refused_in_a_line(arguments, keywords, told):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(told)}$"):
        torch_pipelining.doctor(*arguments, **keywords)

"""Captured steps beside eager ones, on an emulation of CUDA graphs (helpers.graph_maker).

Both run the same steps; losses, gradients, weights and buffers must be equal to the last bit.
"""

import gc
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from helpers.graph_runs import SIZE, STEPS, Block, M, Run, arguments, assert_same, batch, captured
from helpers.processes import run_ranks
from helpers.timetables import random_timetable
from zbpp import (
    CudaGraphs,
    Pipeline,
    Timetable,
    find_non_finite,
    make_mesh,
    per_microbatch,
    plan,
    replicate,
)
from zbpp.autograd import auxiliary_loss, recompute
from zbpp.schedule.families import FAMILIES


@pytest.mark.parametrize("schedule", sorted(FAMILIES))
def test_replayed_steps_equal_eager_ones(schedule):
    found = captured(schedule)
    assert found.graphs.num_replays == STEPS - 2
    assert found.maker.num_captures == sum(map(len, found.timetable.rows))


def test_replayed_steps_equal_eager_ones_under_any_timetable_of_one_rank(first_seed):
    """Many stages in any order: messages of many lives share few buffers."""
    for seed in range(first_seed, first_seed + 6):
        timetable = random_timetable(random.Random(seed), most_ranks=1)

        def given(number, timetable=timetable):
            x, y = batch(number, 2 * timetable.num_microbatches)
            return (x,), y, {}

        found = captured(timetable, steps={"numbers": range(4), "given": given})
        assert found.graphs.num_replays == 2


def test_another_timetable_is_captured_again():
    other = plan("interleaved_1f1b", 1, M, stages_per_rank=2)

    def change(number, pipeline):
        if number == 4:
            pipeline.use_timetable(other)

    found = captured("zb_v", steps={"numbers": range(8), "before": change})
    assert found.graphs.num_replays == 2 + 2  # of steps 0 to 3, and of 4 to 7
    assert found.maker.num_captures == sum(len(*each.rows) for each in (found.timetable, other))


def test_nothing_of_a_capture_but_the_losses_stays_in_the_pool():
    """Activations, saved tensors, gradients between stages: their memory is free when the capture ends."""
    run = Run(True, "zb_v")
    for number in range(3):
        run.step(*arguments(number))
    gc.collect()
    assert len(run.maker.pool) > M
    assert run.maker.held() == M
    run.pipeline.close()


def test_microbatches_that_are_never_alive_together_share_their_messages():
    """On one rank 1F1B holds one microbatch at a time, whatever their number: its x and its g."""
    run = Run(True, Timetable.parse(" ".join(f"0F{m} 1F{m} 1BW{m} 0BW{m}" for m in range(M))))
    for number in range(3):
        run.step(*arguments(number))
    buffers = run.graphs._captured.graphs._given.tensors()
    assert len(buffers) == 3 * M  # x, the gradient of the loss, and g
    assert len({each.data_ptr() for each in buffers}) == 3
    run.pipeline.close()


class WithLosses(nn.Module):
    """A stage with keywords of several kinds, an auxiliary loss, and a loss that is a dict at the end."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(index)
        self.index, self.linear = index, nn.Linear(SIZE, SIZE)

    def forward(self, x, _more=None, _none=None, *, masks, scale, bias):
        out = self.linear(x) * masks["first"][0] * scale + bias
        auxiliary_loss("size", out.square().mean() * 0.1)
        return (out, x + 1, None) if self.index == 0 else out


def dict_loss(output, target):
    return {"square": F.mse_loss(output, target[0]), "mean": output.mean() * target[1].sum()}


def nested(number):
    x, y = batch(number)
    masks = {"first": (torch.rand(M * 2, 1, generator=torch.Generator().manual_seed(number)), None)}
    weights = per_microbatch([torch.tensor([0.5 + number, 1.0])] * M)
    return (
        (x,),
        (y, weights),
        {"masks": masks, "scale": 0.5, "bias": replicate(torch.full((SIZE,), 0.1 * number))},
    )


def rescaled(number, pipeline):
    pipeline.loss_scale = 1.0 + number // 4


def test_nested_arguments_several_losses_and_a_loss_scale_that_changes():
    """A stage returns a None and an output without gradient; loss_scale changes after the capture."""
    found = captured("zb_v", make=WithLosses, loss_fn=dict_loss, steps={"given": nested, "before": rescaled})
    assert found.graphs.num_replays == STEPS - 2


def other_gradients(number, pipeline):
    """Before steps 3 to 5: gradients that are zero, another tensor, and of a kind that no replay takes."""
    if number == 5:
        for each in pipeline.parameters():
            each.grad = torch.ones_like(each)


def test_gradients_that_were_there_before_a_step_are_added_to():
    found = captured(steps={"to_none": False, "before": other_gradients})
    assert found.graphs.num_replays == STEPS - 2


def test_mixed_precision_sums_in_the_main_grad():
    def make(index):
        block = Block(index).bfloat16()
        for each in block.parameters():
            each.main_grad = torch.zeros(each.shape)
        return block

    def given(number):
        (x,), y, _ = arguments(number)
        return (x.bfloat16(),), y.bfloat16(), {}

    eager, found = (Run(mode, "zb_h1", make=make).steps(given=given) for mode in (False, True))
    assert_same(eager.found, found.found)
    mains = [[each.main_grad for each in run.stages[0].parameters()] for run in (eager, found)]
    assert_same(*mains)
    assert found.graphs.num_replays == STEPS - 2


# ------------------------------------------------------------------------------- what can't be captured


class Reads(Block):
    def forward(self, x):
        return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)


class Recomputes(Block):
    def forward(self, x):
        return torch_checkpoint(super().forward, x, use_reentrant=False)


def recomputed(index):
    block = nn.Sequential(Block(index))
    recompute(block[0])
    return block


def drops_gradients(index):
    """An optimizer step in a hook, say, that leaves no `.grad`."""
    block = Block(index)
    block.first.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    return block


UNCAPTURABLE = {
    "reads": (Reads, "not permitted when stream is capturing"),
    "checkpoint": (Recomputes, "current_seed during CUDA graph capture"),
    "recompute": (recomputed, "current_seed during CUDA graph capture"),
    "hook": (drops_gradients, "a gradient is not added to a dense `.grad` in place"),
}


def gradients_of(run):
    return [None if each.grad is None else each.grad.clone() for each in run.pipeline.parameters()]


@pytest.mark.parametrize("case", UNCAPTURABLE)
def test_a_step_that_cannot_be_captured_says_where_and_changes_no_gradient(case):
    make, text = UNCAPTURABLE[case]
    run = Run(True, "zb_h1", make=make)
    for number in range(2):
        run.step(*arguments(number))
    before = gradients_of(run)
    with pytest.raises((RuntimeError, ValueError), match=text) as caught:
        run.step(*arguments(2))
    assert "a step can't be captured" in caught.value.__notes__[-1]
    if case != "hook":
        assert "in 0F0 (F, the forward, of stage 0, microbatch 0) on rank 0" in caught.value.__notes__
    assert_same(gradients_of(run), before)
    run.pipeline.close()


def test_on_the_cpu_a_line_says_that_graphs_need_a_gpu(caplog):
    with Pipeline({0: Block(0)}, plan("zb_h1", 1, M), F.mse_loss, extras=[CudaGraphs()]) as pipeline:
        pipeline.step(batch(0)[0], target=batch(0)[1])
    assert "CUDA graphs need a GPU: running eagerly" in caplog.text


def test_an_evaluation_and_a_search_for_non_finite_values_run_between_replays():
    """The search runs the batch eagerly, with the gradients at the graphs' addresses."""
    found = captured(steps={"before": searched})
    assert found.graphs.num_replays == STEPS - 2


def searched(number, pipeline):
    if number == 4:
        x, y = batch(number)
        pipeline.evaluate(x, target=y)
        assert find_non_finite(pipeline, x, target=y) is None


def test_autocasts_copies_of_weights_do_not_outlive_a_capture():
    """Autocast keeps the weights in bfloat16 until its context ends; a capture computes none."""

    def losses(has_graphs):
        run = Run(has_graphs, "zb_h1")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for number in range(STEPS):
                run.maker.poison()
                run.step(*arguments(number))
                x, y = batch(number)
                run.found += run.pipeline.evaluate(x, target=y)
        run.pipeline.close()
        return run.found

    assert_same(losses(False), losses(True))


# ------------------------------------------------------------------------------- several ranks


def on_two_ranks(rank):
    found = {}
    for schedule, options in (("zb_v", {}), ("1f1b", {}), ("interleaved_zb", {})):
        runs = [Run(has, schedule, num_ranks=2, rank=rank, **options).steps() for has in (False, True)]
        found[schedule] = *(each.found for each in runs), runs[1].graphs.num_replays
    mesh = make_mesh(replicate=2)
    runs = [Run(has, "zb_h1", mesh=mesh).steps() for has in (False, True)]
    found["replicas"] = *(each.found for each in runs), runs[1].graphs.num_replays
    dist.barrier()
    return found


def test_ranks_replay_between_messages_and_reductions():
    for found in run_ranks(on_two_ranks, 2):
        for eager, replayed, num_replays in found.values():
            assert num_replays == STEPS - 2
            assert_same(eager, replayed)

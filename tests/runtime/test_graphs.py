"""Captured steps beside eager ones, on an emulation of CUDA graphs (helpers.graph_maker).

Both run the same steps; losses, gradients, weights and buffers must be equal to the last bit.
"""

import gc
import itertools
import logging
import random
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from helpers.graph_runs import SIZE, STEPS, Block, M, Run, arguments, assert_same, batch, captured
from helpers.processes import run_ranks
from helpers.timetables import random_timetable
from zbpp import ActivationOffload, Pipeline, PostValidation, make_mesh, per_microbatch, plan, replicate
from zbpp.autograd import auxiliary_loss, recompute
from zbpp.families import FAMILIES
from zbpp.runtime import ReplayError


@pytest.mark.parametrize("mode", ["actions", "program"])
@pytest.mark.parametrize("schedule", sorted(FAMILIES))
def test_replayed_steps_equal_eager_ones(mode, schedule):
    found = captured(mode, schedule)
    assert not found.graphs.stopped
    assert (found.graphs.num_captures, found.graphs.num_replays) == (1, STEPS - 2)
    assert found.maker.num_captures == (sum(map(len, found.timetable.rows)) if mode == "actions" else 1)


def test_replayed_steps_equal_eager_ones_under_any_timetable_of_one_rank(first_seed):
    """Many stages in any order: messages of many lives share few buffers."""
    for seed in range(first_seed, first_seed + 6):
        timetable = random_timetable(random.Random(seed), most_ranks=1)

        def given(number, timetable=timetable):
            x, y = batch(number, 2 * timetable.num_microbatches)
            return (x,), y, {}

        found = captured("actions", timetable, steps={"numbers": range(4), "given": given})
        assert found.graphs.num_replays == 2


def test_nothing_of_a_capture_stays_in_the_pool():
    """Activations, saved tensors, gradients between stages: all of the pool is free when the capture ends."""
    run = Run("actions", "zb_v").steps(range(4))
    gc.collect()
    assert run.maker.pool
    assert run.maker.held() == 0


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


@pytest.mark.parametrize("mode", ["actions", "program"])
def test_nested_arguments_several_losses_and_a_loss_scale_that_changes(mode):
    """A stage returns a None and an output without gradient; loss_scale changes after the capture."""
    found = captured(
        mode, "zb_v", make=WithLosses, loss_fn=dict_loss, steps={"given": nested, "before": rescaled}
    )
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

    eager, found = (Run(mode, "zb_h1", make=make).steps(given=given) for mode in ("none", "actions"))
    assert_same(eager.found, found.found)
    mains = [[each.main_grad for each in run.stages[0].parameters()] for run in (eager, found)]
    assert_same(*mains)
    assert found.graphs.num_replays == STEPS - 2


def changing(number, pipeline):
    """What a capture relies on changes: a weight is frozen, a mode, where a weight is, a rate."""
    stage = pipeline.stages[0]
    if number == 3:
        stage.first.weight.requires_grad_(False)
        stage.first.weight.grad = None
    if number == 7:
        stage.norm.eval()
    if number == 11:
        stage.second.weight.data = stage.second.weight.data.clone()
    if number == 14:
        stage.rate = 0.25
    if number == 12:  # nothing that a capture relies on: evaluation, a step that is measured
        pipeline.evaluate(batch(7)[0], target=batch(7)[1])


def test_what_a_capture_relies_on_is_captured_anew_when_it_changes():
    found = captured(steps={"numbers": range(17), "before": changing})
    assert (found.graphs.num_captures, found.graphs.num_replays) == (5, 7)


def other_rows(number):
    x, y = batch(number, M * (3 if number in (4, 6) else 2))
    return (x,), y, {}


def test_a_call_of_another_layout_is_eager_between_replays():
    found = captured(steps={"numbers": range(8), "given": other_rows})
    assert (found.graphs.num_captures, found.graphs.num_replays) == (1, 4)


def test_a_measured_step_is_replayed_action_by_action():
    run = Run("actions", "zb_h1")
    for number in range(3):
        run.step(*arguments(number))
    with run.pipeline.recording():
        run.step(*arguments(3))
    assert run.graphs.num_replays == 2
    assert len(run.pipeline.timeline().timetable.rows[0]) == len(run.timetable.rows[0])
    run.pipeline.close()


# ------------------------------------------------------------------------------- what can't be captured


class Reads(Block):
    def forward(self, x):
        return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)


class Replaces(Block):
    """Replaces a buffer, but not in its first two steps."""

    def __init__(self, index):
        super().__init__(index)
        self.calls = itertools.count(1)

    def forward(self, x):
        if next(self.calls) > 2 * M:
            self.norm.running_mean = self.norm.running_mean * 0.5
        return super().forward(x)


class Keeps(Block):
    def forward(self, x):
        self.output = super().forward(x)
        return self.output


class Recomputes(Block):
    def forward(self, x):
        return torch_checkpoint(super().forward, x, use_reentrant=False)


def recomputed(index):
    block = nn.Sequential(Block(index))
    recompute(block[0])
    return block


def hooked(index):
    block = Block(index)
    block.first.weight.register_post_accumulate_grad_hook(lambda _: None)
    return block


UNCAPTURABLE = {
    "reads": (Reads, "0F0 can't be captured .*not permitted when stream is capturing"),
    "replaces": (Replaces, "forward replaces norm.running_mean of Replaces"),
    "keeps": (Keeps, "forward replaces output of Keeps"),
    "checkpoint": (Recomputes, "0F0 can't be captured .*current_seed during CUDA graph capture"),
    "recompute": (recomputed, "0F0 can't be captured .*current_seed during CUDA graph capture"),
    "hook": (hooked, "first.weight has a post-accumulate-grad hook"),
}


@pytest.mark.parametrize("case", UNCAPTURABLE)
@pytest.mark.parametrize("mode", ["actions", "program"])
def test_what_cannot_be_captured_runs_eagerly_and_a_line_says_why(mode, case, caplog):
    make, text = UNCAPTURABLE[case]
    with caplog.at_level(logging.WARNING):
        found = captured(mode, make=make, steps={"numbers": range(4)})
    assert found.graphs.num_replays == 0
    (line,) = [each.getMessage() for each in caplog.records if "graphs" in each.name]
    assert line.startswith(f"cuda_graphs={mode} on rank 0: ")
    assert line.endswith(": running eagerly")
    assert re.search(text, line)


def test_a_call_that_no_buffer_can_hold_is_eager(caplog):
    """Objects, say, that a replay would not look into; after eight steps a line says so."""

    def given(number):
        (x,), y, _ = arguments(number)
        return (x,), y, {"note": {"object": object()}}

    with caplog.at_level(logging.WARNING):
        found = captured(steps={"numbers": range(9), "given": given})
    assert found.graphs.num_captures == 0
    (line,) = [each.getMessage() for each in caplog.records if "graphs" in each.name]
    assert "8 steps in a row were eager, the last one since the call has a object" in line


def test_module_hooks_are_named_once(caplog):
    def make(index):
        block = Block(index)
        block.first.register_forward_hook(lambda *_: None)
        return block

    with caplog.at_level(logging.WARNING):
        captured(make=make)
    (line,) = [each.getMessage() for each in caplog.records if "graphs" in each.name]
    assert (
        line
        == "cuda_graphs=actions: hooks of module first run when a step is captured, not when it is replayed"
    )


def test_on_the_cpu_a_line_says_that_graphs_need_a_gpu(caplog):
    with Pipeline({0: Block(0)}, plan("zb_h1", 1, M), F.mse_loss, cuda_graphs="actions") as pipeline:
        pipeline.step(batch(0)[0], target=batch(0)[1])
    assert "cuda_graphs=actions: CUDA graphs need a GPU: running eagerly" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cuda_graphs": "action"}, "cuda_graphs='action': write one of none, actions, program"),
        ({"cuda_graphs": "actions", "dynamic_shapes": True}, "doesn't go with dynamic_shapes"),
        ({"cuda_graphs": "actions", "offload": ActivationOffload(1.0)}, "doesn't go with offload"),
        ({"cuda_graphs": "program", "check_messages": True}, "write cuda_graphs=actions"),
    ],
)
def test_what_does_not_go_with_graphs_is_refused_before_the_first_step(options, text):
    with pytest.raises(ValueError, match=text):
        Pipeline({0: Block(0)}, plan("zb_h1", 1, M), F.mse_loss, **options)


def test_switches_that_come_later_are_refused_too():
    run = Run("actions", "zb_h1")
    with pytest.raises(ValueError, match="gradient release"):
        run.pipeline.release_gradients(run.optimizer)
    with pytest.raises(ValueError, match="post-validation doesn't go with CUDA graphs"):
        PostValidation(run.pipeline, run.optimizer)
    run.pipeline.close()


def test_a_search_for_non_finite_values_runs_between_replays():
    """It runs the batch eagerly, with the gradients at the graphs' addresses."""
    found = captured(steps={"before": searched})
    assert found.graphs.num_replays == STEPS - 2


def searched(number, pipeline):
    if number == 4:
        x, y = batch(number)
        assert pipeline.find_non_finite(x, target=y) is None


SCALE = [1.0]


class ReadsGlobal(Block):
    def forward(self, x):
        return super().forward(x) * SCALE[0]


def test_a_step_that_runs_twice_compares_its_replay_with_an_eager_step():
    """What a replay can't see, a change of an object that forward reads, this check finds."""
    run = Run("actions", "zb_h1", make=ReadsGlobal)
    for number in range(3):
        run.step(*arguments(number))
    with run.pipeline.replaying():
        run.step(*arguments(3))
    SCALE[0] = 2.0
    try:
        with run.pipeline.replaying(), pytest.raises(ReplayError):
            run.step(*arguments(4))
    finally:
        SCALE[0] = 1.0
    assert run.graphs.num_replays == 3
    run.pipeline.close()


# ------------------------------------------------------------------------------- several ranks


class Tied(Block):
    def __init__(self, index):
        super().__init__(index)
        self.tied_parameters = {} if index == 0 else {"second.weight": "0.second.weight"}


def on_two_ranks(rank):
    found = {}
    for schedule, options in (("zb_v", {}), ("1f1b", {"check_messages": True}), ("interleaved_zb", {})):
        runs = [
            Run(mode, schedule, num_ranks=2, rank=rank, **options).steps() for mode in ("none", "actions")
        ]
        found[schedule] = *(each.found for each in runs), runs[1].graphs.num_replays, runs[1].graphs.stopped
    for schedule in ("zb_v", "1f1b"):
        runs = [Run(mode, schedule, num_ranks=2, rank=rank).steps() for mode in ("none", "program")]
        found["program", schedule] = (
            *(each.found for each in runs),
            runs[1].graphs.num_replays,
            runs[1].graphs.stopped,
        )
    # A rank whose stages can't be captured is eager, the other one replays.
    makes = [Block, Reads]
    runs = [
        Run(mode, "zb_h1", num_ranks=2, rank=rank, make=makes[rank]).steps() for mode in ("none", "actions")
    ]
    found["half"] = *(each.found for each in runs), runs[1].graphs.num_replays, runs[1].graphs.stopped
    mesh = make_mesh(replicate=2)
    runs = [Run(mode, "zb_h1", mesh=mesh).steps() for mode in ("none", "actions")]
    found["replicas"] = *(each.found for each in runs), runs[1].graphs.num_replays, runs[1].graphs.stopped
    dist.barrier()
    return found


@pytest.mark.slow
def test_ranks_replay_between_messages_and_reductions():
    for rank, found in enumerate(run_ranks(on_two_ranks, 2)):
        for case, (eager, replayed, num_replays, stopped) in found.items():
            is_eager = (case, rank) == ("half", 1)
            assert num_replays == (0 if is_eager else STEPS - 2)
            assert ("1F0 can't be captured" in stopped) == is_eager
            assert_same(eager, replayed)


def test_a_mode_that_is_refused_leaves_nothing_open(monkeypatch):
    """The links were made before the mode was looked at, and stayed."""
    monkeypatch.setattr("zbpp.runtime.pipeline.RankParts", lambda *_, **__: pytest.fail("links were made"))
    with pytest.raises(ValueError, match="cuda_graphs"):
        Pipeline({0: nn.Linear(2, 2)}, plan("zb_h1", 1, 1), F.mse_loss, cuda_graphs="action")

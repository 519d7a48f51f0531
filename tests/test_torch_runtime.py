"""Our timetables in torch's own pipeline runtime, and torch's in ours: real processes, the same gradients.

torch's `_PipelineScheduleRuntime` is private; what is used of it is what `to_csv` promises to work with.
Its split crashes on an output that is a view and leaves gradients out elsewhere, hence a plain model.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from helpers.processes import run_ranks
from helpers.tensors import gradients_of
from helpers.torch_runtime import needs_a_v
from zbpp import Pipeline
from zbpp.planning import SCHEDULES, plan
from zbpp.schedule import Costs, Op, PlanError, Timetable, from_csv, simulate, to_csv

WIDTH, ROWS = 5, 3  # of an activation; of a microbatch
LETTERS = {Op.F: "F", Op.B: "I", Op.W: "W", Op.BW: "B"}


class Run(NamedTuple):
    """Microbatch losses, and gradients by parameter."""

    losses: list[float]
    grads: dict[str, Tensor]


def stage_of(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, WIDTH)).double()


def batch(num_microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(99)
    inputs, target = torch.randn(2, num_microbatches * ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, target


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def plain(num_stages: int, num_microbatches: int) -> Run:
    """The whole model, microbatches one after another, loss.backward()."""
    stages = {index: stage_of(index) for index in range(num_stages)}
    model = nn.Sequential(*stages.values())
    losses = []
    for inputs, target in zip(*(each.split(ROWS) for each in batch(num_microbatches)), strict=True):
        loss = loss_of(model(inputs), target)
        (loss / num_microbatches).backward()
        losses.append(loss.item())
    return Run(losses, gradients_of(stages))


def run_in_zbpp(rank: int, timetable: Timetable) -> Run:
    stages = {index: stage_of(index) for index in timetable.stages_of(rank)}
    inputs, target = batch(timetable.num_microbatches)
    pipeline = Pipeline(stages, timetable, loss_fn=loss_of)
    losses = pipeline.step(
        *((inputs,) if 0 in stages else ()), target=target if timetable.num_stages - 1 in stages else None
    )
    return Run([loss.item() for loss in losses], gradients_of(stages))


def run_in_torch(rank: int, timetable: Timetable, path: Path) -> Run:
    """What a user of torch does with a plan: write the CSV, load it, step."""
    stages = {index: stage_of(index) for index in timetable.stages_of(rank)}
    path.write_text(to_csv(timetable))
    runtime = schedules._PipelineScheduleRuntime(
        [PipelineStage(stage, i, timetable.num_stages, torch.device("cpu")) for i, stage in stages.items()],
        timetable.num_microbatches,
        loss_fn=loss_of,
    )
    runtime._load_csv(str(path))
    inputs, target = batch(timetable.num_microbatches)
    losses: list[Tensor] = []
    runtime.step(*((inputs,) if 0 in stages else ()), target=target, losses=losses, return_outputs=False)
    return Run([loss.item() for loss in losses], gradients_of(stages))


def run_in_both(rank: int, texts: list[str], folder: Path) -> list[tuple[Run, Run]]:
    """(torch's, ours) for one timetable after the other, in the same processes."""
    timetables = list(map(Timetable.parse, texts))
    return [
        (run_in_torch(rank, timetable, folder / f"{rank}.csv"), run_in_zbpp(rank, timetable))
        for timetable in timetables
    ]


def merged(runs: list[Run]) -> Run:
    return Run(
        [loss for run in runs for loss in run.losses],
        {name: grad for run in runs for name, grad in run.grads.items()},
    )


def assert_equal(found: Run, expected: Run) -> None:
    """To 1e-12, relative to max(the parameter's largest gradient, 1e-6 of the model's largest)."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-12, abs=0)
    assert found.grads.keys() == expected.grads.keys()
    floor = 1e-6 * max(grad.abs().max().item() for grad in expected.grads.values())
    for name, grad in expected.grads.items():
        scale = max(grad.abs().max().item(), floor)
        assert (found.grads[name] - grad).abs().max().item() <= 1e-12 * scale, name


def of_torch(name: str, num_ranks: int, num_microbatches: int) -> Any:
    """A schedule of torch's with two stages per rank, which needs to know no more of them."""
    about = {"group_size": num_ranks, "group_rank": 0, "num_stages": 2 * num_ranks, "submod": None}
    stages = [SimpleNamespace(stage_index=index, **about) for index in range(2)]
    return getattr(schedules, name)(stages, num_microbatches)


def unfolded(order: dict[int, list[Any]]) -> dict[int, list[tuple[int, str, int]]]:
    """(stage, torch's letter, microbatch) of what torch's runtime computes, per rank."""
    return {
        rank: [
            (each.stage_index, each.computation_type.value, each.microbatch_index)
            for action in filter(None, actions)
            for each in action.sub_actions or [action]
            if each.is_compute_op
        ]
        for rank, actions in order.items()
    }


def lettered(timetable: Timetable) -> dict[int, list[tuple[int, str, int]]]:
    """The same of a timetable."""
    return {
        rank: [(stage, LETTERS[op], microbatch) for stage, op, microbatch in row]
        for rank, row in enumerate(timetable.rows)
    }


def dumped(schedule: Any, path: Path, form: str) -> str:
    schedule._dump_csv(str(path), form)
    return path.read_text()


def in_a_v(folder: Path) -> dict[str, Timetable]:
    """On two ranks: ours, a searched one for uneven stages, and torch's own."""
    uneven = Costs(f=[1, 2, 1, 3], b=[2, 1, 1, 3], w=[1, 1.5, 2, 0.5], comm=0.25)
    options: dict[str, Any] = {"placement": "v", "memory_limit": 3.0, "time_limit": 0.5}
    return {
        "zb_v": plan("zb_v", 2, 5),
        "zb_auto": plan("zb_auto", 2, 5, costs=uneven, **options),
        "torch": from_csv(dumped(of_torch("ScheduleDualPipeV", 2, 5), folder / "dump", "compute_only")),
    }


def in_a_line(folder: Path) -> dict[str, Timetable]:
    """On three ranks: families, one of them looped, and a searched one for uneven stages."""
    uneven = Costs(f=[1, 2, 5], b=[2, 1, 3], w=[1, 1.5, 0.5], bw=[2.2, 2.2, 2.5], comm=0.25, deferred=0.8)
    return {
        "zb_h1": plan("zb_h1", 3, 6),
        "zb_auto": plan("zb_auto", 3, 6, costs=uneven, memory_limit=3.5, time_limit=0.5),
        "1f1b": plan("1f1b", 3, 4),
        "interleaved_zb": plan("interleaved_zb", 3, 6),
    }


def ops_of(timetable: Timetable) -> set[Op]:
    return {action.op for row in timetable.rows for action in row}


@pytest.mark.parametrize(("choose", "num_ranks"), [(in_a_line, 3), pytest.param(in_a_v, 2, marks=needs_a_v)])
def test_both_runtimes_compute_the_gradients_of_plain_autograd(
    choose: Callable[[Path], dict[str, Timetable]], num_ranks: int, tmp_path: Path
) -> None:
    timetables = choose(tmp_path)
    assert set.union(*map(ops_of, timetables.values())) == set(Op)
    results = run_ranks(run_in_both, num_ranks, list(map(str, timetables.values())), tmp_path)
    for i, timetable in enumerate(timetables.values()):
        in_torch, in_zbpp = (merged([rank[i][which] for rank in results]) for which in (0, 1))
        expected = plain(timetable.num_stages, timetable.num_microbatches)
        assert len(expected.losses) == timetable.num_microbatches
        assert_equal(in_torch, expected)
        assert_equal(in_zbpp, expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_every_schedule_as_it_is(name: str) -> None:
    """With torch's own reader, validator, and the pass that adds its messages."""
    timetable = plan(name, 3, 6, time_limit=0.3)
    read = csv.reader(to_csv(timetable).splitlines())
    order = {rank: [schedules._Action.from_str(cell) for cell in cells] for rank, cells in enumerate(read)}
    assert unfolded(order) == lettered(timetable)
    placement = schedules._validate_schedule(order, 3, timetable.num_stages, 6)
    assert placement == dict(enumerate(timetable.rank_of))
    assert unfolded(schedules._add_send_recv(order, placement.get, timetable.num_stages)) == lettered(
        timetable
    )


TORCHS = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "Interleaved1F1B", "LoopedBFS")


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (3, 9)])
@pytest.mark.parametrize("name", TORCHS)
def test_what_torch_dumps_is_read_as_torch_runs_it(
    name: str, num_ranks: int, num_microbatches: int, form: str, tmp_path: Path
) -> None:
    schedule = of_torch(f"Schedule{name}", num_ranks, num_microbatches)
    text = dumped(schedule, tmp_path / "dump.csv", form)
    timetable = from_csv(text)
    assert lettered(timetable) == unfolded(schedule.pipeline_order)
    assert dict(enumerate(timetable.rank_of)) == schedule.stage_index_to_group_rank
    assert ("OVERLAP_F_B" in text) == (name == "DualPipeV")
    assert ("SEND_F" in text) == (form == "compute_comms")


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_schedules_can_run_but_for_the_one_that_sums_backwards(name: str, tmp_path: Path) -> None:
    timetable = from_csv(dumped(of_torch(f"Schedule{name}", 2, 4), tmp_path / "dump.csv", "compute_only"))
    if name != "LoopedBFS":
        assert simulate(timetable).makespan > 0
        return
    with pytest.raises(PlanError, match="B or BW of a stage must ascend in microbatch"):
        simulate(timetable)


def test_gpipe_of_torch_is_ours() -> None:
    """It dumps nothing, but states its order: idle ticks, and a gradient reduction at the end."""
    about = SimpleNamespace(_num_stages=3, _n_microbatches=6)
    order = schedules.ScheduleGPipe._get_pipeline_order(about)
    text = "\n".join(",".join(str(each or "") for each in row) for row in order.values())
    assert "1REDUCE_GRAD" in text
    assert from_csv(text) == plan("gpipe", 3, 6)

"""torch's runtime as a runner: what it executes, that it does the same work, and how it fails."""

import pytest
import torch
from torch import nn

from helpers.processes import run_ranks
from helpers.torch_runtime import RUNS_A_V, needs_a_v
from zbpp import plan, simulate
from zbpp.benchmark.interleaved_timing import TimedRunner, ZbppRunner, start, time_in_turns, try_to_start
from zbpp.benchmark.workload import Workload
from zbpp.data import regression_data
from zbpp.job.world import World
from zbpp.models import emulated
from zbpp.models.mlp import Mlp

P, M = 2, 4
CPU = torch.device("cpu")
MLP = {"in_features": 6, "hidden_size": 8, "out_features": 3, "num_layers": 8}


def workload(rank, model, in_features=8, out_features=8):
    data = regression_data(in_features=in_features, out_features=out_features, batch_size=2 * M, seed=0)
    return Workload(model=model, data=data, here=World(rank, P, CPU), num_microbatches=M, timeout=100)


# ---------------------------------------------------------------- emulated stages under torch's split


def naps(rank, schedule):
    """{stage and op: milliseconds slept in one of its actions}, of a step of torch's runtime."""
    from zbpp.benchmark.torch_runner import TorchRunner

    timetable = plan(schedule, P, M)
    work = workload(rank, emulated.Emulated(num_layers=timetable.num_stages, f=1.0, b=2.0, w=4.0))
    runner = TorchRunner(work, schedule, timetable)
    slept = []
    emulated.sleep = slept.append
    runner.step(*work.batch(timetable, 0))
    slept.clear()
    inside = {}

    def sleep(milliseconds):
        action = runner._row[-1]
        inside.setdefault((action.stage, str(action.op), action.microbatch), []).append(milliseconds)

    emulated.sleep = sleep
    runner.step(*work.batch(timetable, 0))
    return {f"{stage}{op}": slept for (stage, op, microbatch), slept in inside.items() if microbatch == 1}


@needs_a_v
def test_torchs_split_sleeps_b_in_its_input_pass_and_w_in_its_weight_pass_except_on_stage_0():
    first, second = run_ranks(naps, P, "zb_v")
    assert first | second == {
        "0F": [1], "1F": [1], "2F": [1], "3F": [1],
        "1B": [2], "2B": [2], "3B": [2],
        "1W": [4], "2W": [4], "3W": [4],
        "0W": [2, 4],  # never split: all of it in W
    }  # fmt: skip


def test_torchs_whole_backward_sleeps_both():
    first, second = run_ranks(naps, P, "1f1b")
    assert first | second == {"0F": [1], "1F": [1], "0BW": [2, 4], "1BW": [2, 4]}


# ---------------------------------------------------------------- the same work


def losses_and_orders(rank, schedules):
    from zbpp.benchmark.torch_runner import TorchRunner

    work = workload(rank, Mlp(**MLP), 6, 3)
    found = {}
    for schedule in schedules:
        timetable = plan(schedule, P, M)
        rows = []
        for runner in (ZbppRunner(work, timetable), TorchRunner(work, schedule, timetable)):
            losses = runner.step(*work.batch(timetable, 0))
            grads = [p.grad.clone() for stage in work.stages(timetable).values() for p in stage.parameters()]
            work.drop_gradients(timetable)
            timeline = runner.timeline()
            rows.append((losses, grads, [str(row) for row in timeline.timetable.rows], timeline.makespan))
        found[schedule] = rows
    return found


IN_A_LINE = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zb"]
IN_A_V = ["zb_v", "dualpipe_v"]
SCHEDULES = [*IN_A_LINE, *(pytest.param(name, marks=needs_a_v) for name in IN_A_V)]


@pytest.fixture(scope="module")
def both():
    return run_ranks(losses_and_orders, P, IN_A_LINE + IN_A_V * RUNS_A_V)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_gradients_are_those_of_zbpps_runtime(both, schedule):
    for rank in range(P):
        (losses, grads, _, _), (their_losses, their_grads, _, _) = both[rank][schedule]
        assert len(losses) == len(their_losses)
        assert len(grads) == len(their_grads) > 0
        for ours, theirs in zip([*losses, *grads], [*their_losses, *their_grads], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_action_is_in_its_measured_timeline_once(both, schedule):
    """Whatever the order: torch's looped BFS goes backwards in descending microbatches."""
    _, (_, _, rows, makespan) = both[0][schedule]
    actions = " ".join(rows).split()
    num_stages = plan(schedule, P, M).num_stages
    assert len(actions) == len(set(actions))
    for kinds in (["F"], ["B", "BW"], ["W", "BW"]):
        expected = {(s, m) for s in range(num_stages) for m in range(M)}
        assert {(s, m) for s, m in expected for kind in kinds if f"{s}{kind}{m}" in actions} == expected
    assert makespan > 0


# ---------------------------------------------------------------- failures


class Viewing(Mlp):
    """Its stages return views, which torch's split can't detach."""

    def build_stage(self, index, num_stages):
        return nn.Sequential(super().build_stage(index, num_stages), nn.Unflatten(1, (-1,)))


def timed_after_a_failure(rank):
    from zbpp.benchmark.torch_runner import TorchRunner

    work = workload(rank, Viewing(**MLP), 6, 3)
    timetable = plan("interleaved_zb", P, M)
    ours = start("interleaved_zb", work, timetable)
    theirs = try_to_start(
        TimedRunner("interleaved_zb", "torch", timetable),
        work,
        lambda: TorchRunner(work, "interleaved_zb", timetable),
    )
    time_in_turns([ours, theirs], work, 2)
    return theirs.failure, theirs.wall_times, ours.wall_times, theirs.runner


def test_what_torch_cannot_run_is_said_on_all_ranks_and_timing_goes_on():
    for failure, their_wall_times, wall_times, runner in run_ranks(timed_after_a_failure, P):
        assert failure.startswith("RuntimeError: Can't detach views in-place")
        assert "\n" not in failure
        assert (their_wall_times, runner) == ([], None)
        assert len(wall_times) == 2


def two_timed_in_turns(rank):
    work = workload(rank, emulated.Emulated(num_layers=P, f=4.0, b=4.0, w=4.0))
    timed = [start(name, work, plan(name, P, M)) for name in ("1f1b", "zb_h1")]
    time_in_turns(timed, work, 3)
    return [
        (e.step_time, e.wall_times, e.predicted.makespan, [t.makespan for t in e.timelines]) for e in timed
    ]


def test_each_runner_is_measured_by_one_clock_on_all_ranks():
    first, second = run_ranks(two_timed_in_turns, P)
    assert first == second
    for (step_time, wall_times, predicted, timelines), name in zip(first, ("1f1b", "zb_h1"), strict=True):
        assert step_time == sorted(wall_times)[1]
        assert all(wall >= timeline > M * 12 for wall, timeline in zip(wall_times, timelines, strict=True))
        assert predicted >= simulate(plan(name, P, M)).makespan * 4  # sleeps are never short

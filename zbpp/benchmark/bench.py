"""Which schedules and runtimes a benchmark times on one workload, and under which timetables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from zbpp.benchmark.interleaved_timing import TimedRunner, close_all, start, time_in_turns, try_to_start
from zbpp.benchmark.measurement import measure
from zbpp.benchmark.workload import Workload
from zbpp.planning import plan, takes_costs
from zbpp.runtime.parallel.mesh import planned_by_rank_0
from zbpp.schedule import Costs, Timetable, simulate

TUNED = "interleaved_1f1b"
_STAGES_PER_RANK = (2, 3, 4)  # among which the tuned one is chosen
_MEASURED_STEPS = 3


class Options(NamedTuple):
    """compare: "torch" for torch's runtime beside zbpp's, or "none".

    memory_limit: for schedules that are planned for costs and for the tuned interleaved 1F1B, in activations
    of one rank's share of the model; None: the most that any other schedule here holds. time_limit: of each
    search, in seconds.
    """

    num_repeats: int = 5
    compare: str = "torch"
    memory_limit: float | None = None
    time_limit: float = 10.0


def bench(workload: Workload, names: Sequence[str], options: Options) -> list[TimedRunner]:
    """Time the schedules of these names and a tuned interleaved 1F1B, in turns. Collective."""
    timetables, limit, deferred = _timetables(workload, names, options)
    timed = [start(name, workload, timetable) for name, timetable in timetables.items()]
    tuned = tune_interleaved_1f1b(workload, deferred, limit)
    if tuned is not None:
        timed = _with_tuned(timed, tuned)
    if options.compare == "torch":
        timed = [each for ours in timed for each in (ours, *_in_torch(workload, ours))]
    time_in_turns(timed, workload, options.num_repeats)
    close_all(timed)
    return timed


def _timetables(
    workload: Workload, names: Sequence[str], options: Options
) -> tuple[dict[str, Timetable], float, float]:
    """({name: timetable}, the memory limit, the share of an activation that waits for W)."""
    size, num_microbatches = workload.here.size, workload.num_microbatches
    measured = measure(workload, plan("zb_h1", size, num_microbatches), _MEASURED_STEPS)
    deferred = measured.deferred_share
    fixed = {name: plan(name, size, num_microbatches) for name in names if not takes_costs(name)}
    peaks = [peak_activations(timetable, deferred) for timetable in fixed.values()]
    limit = options.memory_limit or max(peaks, default=float(size))

    def timetable_of(name: str) -> Timetable:
        if name in fixed:
            return fixed[name]
        return planned_by_rank_0(
            lambda: plan(
                name,
                size,
                num_microbatches,
                costs=measured.in_activations,
                memory_limit=limit,
                time_limit=options.time_limit,
            )
        )

    return {name: timetable_of(name) for name in names}, limit, deferred


def _with_tuned(timed: list[TimedRunner], tuned: TimedRunner) -> list[TimedRunner]:
    """The list with the tuned runner; if it has the same timetable already, only with its note."""
    same = [each for each in timed if each.timetable == tuned.timetable]
    if not same:
        return [*timed, tuned]
    for each in same:
        each.note = tuned.note
    close_all([tuned])
    return timed


def _in_torch(workload: Workload, ours: TimedRunner) -> list[TimedRunner]:
    """torch's schedule of the same name and cut, if torch has one."""
    from zbpp.benchmark.torch_runner import SCHEDULES, TorchRunner  # a second to import

    if ours.name not in SCHEDULES:
        return []
    timed = TimedRunner(ours.name, "torch", ours.timetable)
    return [try_to_start(timed, workload, partial(TorchRunner, workload, ours.name, ours.timetable))]


def tune_interleaved_1f1b(workload: Workload, deferred: float, limit: float) -> TimedRunner | None:
    """The fastest interleaved 1F1B within `limit`: each is simulated with the costs measured under it.

    If none is within `limit`, the one that holds least. Returns None if the model or the number of
    microbatches allows none at all. Collective.
    """
    candidates = list(_candidates(workload))
    if not candidates:
        return None
    time_in_turns(candidates, workload, _MEASURED_STEPS)
    peaks = [peak_activations(each.timetable, deferred) for each in candidates]
    allowed = max(limit, min(peaks))
    fitting = [pair for pair in zip(candidates, peaks, strict=True) if pair[1] <= allowed]
    best, peak = min(fitting, key=lambda pair: simulate(pair[0].timetable, pair[0].costs).makespan)
    close_all(each for each in candidates if each is not best)
    best.wall_times.clear()
    best.timelines.clear()
    stages = best.timetable.num_stages // best.timetable.num_ranks
    above = "" if peak <= limit else f", over the {limit:.3g} of the others"
    best.note = f"tuned: {stages} stages per rank, holds {peak:.3g} activations{above}"
    return best


def _candidates(workload: Workload) -> Iterator[TimedRunner]:
    for stages_per_rank in _STAGES_PER_RANK:
        try:
            timetable = plan(
                TUNED, workload.here.size, workload.num_microbatches, stages_per_rank=stages_per_rank
            )
            workload.stages(timetable)
        except ValueError:  # PlanError is one, too: the microbatches or the layers allow no such cut
            continue
        yield start(TUNED, workload, timetable)


def peak_activations(timetable: Timetable, deferred: float) -> float:
    """The most that a rank holds, in activations of one rank's share of the model.

    deferred: the part of an activation that waits for W.
    """
    parts = timetable.num_stages / timetable.num_ranks
    return max(simulate(timetable, Costs(saved=1 / parts, deferred=deferred / parts)).peak_memory)

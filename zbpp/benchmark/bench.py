"""Which schedules and runtimes a benchmark times on one workload, and under which timetables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from zbpp.benchmark.interleaved_timing import TimedRunner, close_all, start, time_in_turns, try_to_start
from zbpp.benchmark.measurement import measure
from zbpp.benchmark.workload import Workload
from zbpp.planning import plan, takes_costs
from zbpp.runtime.processes.mesh import planned_by_rank_0
from zbpp.schedule import Costs, Timetable, simulate

_MEASURED_STEPS = 3


class Options(NamedTuple):
    """compare: "torch" for torch's runtime beside zbpp's, or "none".

    memory_limit: for schedules that are planned for costs, in activations of one rank's share of the model;
    None: the most that any other schedule here holds. time_limit: of each search, in seconds.
    """

    num_repeats: int = 5
    compare: str = "torch"
    memory_limit: float | None = None
    time_limit: float = 10.0


def bench(workload: Workload, names: Sequence[str], options: Options) -> list[TimedRunner]:
    """Time the schedules of these names in turns, torch's beside zbpp's. Collective."""
    timetables = _timetables(workload, names, options)
    timed = [start(name, workload, timetable) for name, timetable in timetables.items()]
    if options.compare == "torch":
        timed = [each for ours in timed for each in (ours, *_in_torch(workload, ours))]
    time_in_turns(timed, workload, options.num_repeats)
    close_all(timed)
    return timed


def _timetables(workload: Workload, names: Sequence[str], options: Options) -> dict[str, Timetable]:
    """{name: timetable}; schedules that are planned for costs get those measured here."""
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

    return {name: timetable_of(name) for name in names}


def _in_torch(workload: Workload, ours: TimedRunner) -> list[TimedRunner]:
    """torch's schedule of the same name and cut, if torch has one."""
    from zbpp.benchmark.torch_runner import SCHEDULES, TorchRunner  # a second to import

    if ours.name not in SCHEDULES:
        return []
    timed = TimedRunner(ours.name, "torch", ours.timetable)
    return [try_to_start(timed, workload, partial(TorchRunner, workload, ours.name, ours.timetable))]


def peak_activations(timetable: Timetable, deferred: float) -> float:
    """The most that a rank holds, in activations of one rank's share of the model.

    deferred: the part of an activation that waits for W.
    """
    parts = timetable.num_stages / timetable.num_ranks
    return max(simulate(timetable, Costs(saved=1 / parts, deferred=deferred / parts)).peak_memory)

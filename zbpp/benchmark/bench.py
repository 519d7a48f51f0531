"""Several schedules under two runtimes on one workload: who takes part, and with which timetable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from zbpp.benchmark.interleaved_timing import Entry, attempt, dismiss, enter, race
from zbpp.benchmark.measurement import measure
from zbpp.benchmark.workload import Workload
from zbpp.planning import plan, takes_costs
from zbpp.runtime.world import planned_by_rank_0
from zbpp.schedule import Costs, Timetable, simulate

TUNED = "interleaved_1f1b"
_STAGES_PER_RANK = (2, 3, 4)  # what the tuned one is chosen from
_MEASURED_STEPS = 3


class Options(NamedTuple):
    """compare: "torch" for its runtime beside ours, "none".

    memory_limit: of what is planned for measured costs and of the tuned interleaved 1F1B, in activations of
    one rank's share of the model; None: the most that any other schedule here holds. time_limit: of each
    search, in seconds.
    """

    num_repeats: int = 5
    compare: str = "torch"
    memory_limit: float | None = None
    time_limit: float = 10.0


def bench(workload: Workload, names: Sequence[str], options: Options) -> list[Entry]:
    """Let the schedules of these names take turns, and a tuned interleaved 1F1B. Collective."""
    size, num_microbatches = workload.here.size, workload.num_microbatches
    measured = measure(workload, plan("zb_h1", size, num_microbatches), _MEASURED_STEPS)
    costs, deferred = measured.in_activations, measured.deferred_share
    fixed = {name: plan(name, size, num_microbatches) for name in names if not takes_costs(name)}
    held = [peak_of(timetable, deferred) for timetable in fixed.values()]
    limit = options.memory_limit or max(held, default=float(size))

    def timetable_of(name: str) -> Timetable:
        how: dict[str, Any] = {"costs": costs, "memory_limit": limit, "time_limit": options.time_limit}
        make = partial(plan, name, size, num_microbatches, **how)
        return fixed[name] if name in fixed else planned_by_rank_0(make)

    entries = [enter(name, workload, timetable_of(name)) for name in names]
    best = tuned(workload, deferred, limit)
    if best is not None:
        same = [entry for entry in entries if entry.timetable == best.timetable]
        for entry in same:
            entry.note = best.note
        if same:
            dismiss([best])
        else:
            entries.append(best)
    if options.compare == "torch":
        entries = [each for entry in entries for each in (entry, *_theirs(workload, entry))]
    race(entries, workload, options.num_repeats)
    dismiss(entries)
    return entries


def _theirs(workload: Workload, ours: Entry) -> list[Entry]:
    """torch's of the same name and cut, if it has one."""
    from zbpp.benchmark.torch_runner import SCHEDULES as KNOWN
    from zbpp.benchmark.torch_runner import Torch  # a second to import

    if ours.name not in KNOWN:
        return []
    theirs = Entry(ours.name, "torch", ours.timetable)
    return [attempt(theirs, workload, partial(Torch, workload, ours.name, ours.timetable))]


def tuned(workload: Workload, deferred: float, limit: float) -> Entry | None:
    """The interleaved 1F1B that its own measured costs predict to be fastest, of those within `limit`.

    Where none is: the one that holds least. None: the model or the microbatches allow none at all.
    """
    found = list(_candidates(workload))
    if not found:
        return None
    race(found, workload, _MEASURED_STEPS)
    peaks = [peak_of(entry.timetable, deferred) for entry in found]
    least = max(limit, min(peaks))
    fitting = [(entry, peak) for entry, peak in zip(found, peaks, strict=True) if peak <= least]
    best, peak = min(fitting, key=lambda pair: simulate(pair[0].timetable, pair[0].costs).makespan)
    dismiss(entry for entry in found if entry is not best)
    best.walls.clear()
    best.timelines.clear()
    stages = best.timetable.num_stages // best.timetable.num_ranks
    above = "" if peak <= limit else f", over the {limit:.3g} of the others"
    best.note = f"tuned: {stages} stages per rank, holds {peak:.3g} activations{above}"
    return best


def _candidates(workload: Workload) -> Iterator[Entry]:
    for stages_per_rank in _STAGES_PER_RANK:
        try:
            timetable = plan(
                TUNED, workload.here.size, workload.num_microbatches, stages_per_rank=stages_per_rank
            )
            workload.stages(timetable)
        except ValueError:  # a PlanError too: this one doesn't fit
            continue
        yield enter(TUNED, workload, timetable)


def peak_of(timetable: Timetable, deferred: float) -> float:
    """The most that a rank holds, in activations of one rank's share; W waits with `deferred` of one."""
    parts = timetable.num_stages / timetable.num_ranks
    return max(simulate(timetable, Costs(saved=1 / parts, deferred=deferred / parts)).peak_memory)

"""The race: contestants take turns, one step each, so that a slow moment of the machine hits all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from zbpp.benchmark.runner import Contestant, Zbpp
from zbpp.benchmark.workload import Workload
from zbpp.runtime.measure import clock_offset, measured_costs
from zbpp.runtime.memory import live_bytes
from zbpp.runtime.world import gather
from zbpp.schedule import Costs, PlanError, Timeline, Timetable, simulate


@dataclass
class Entry:
    """A contestant and what was seen of it: a wall time (ms) and a timeline per turn, its peak per rank.

    timetable: whose cut it has. failure: why it takes no part, in a line. note: what else to say.
    """

    name: str
    runtime: str
    timetable: Timetable
    contestant: Contestant | None = None
    failure: str = ""
    note: str = ""
    peak_bytes: list[int] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def makespan(self) -> float:
        """The median turn: from the first rank's start to the last rank's end, ms."""
        return median(self.walls)

    @property
    def typical(self) -> Timeline:
        """The timeline of the turn with the median wall time."""
        order = sorted(range(len(self.walls)), key=self.walls.__getitem__)
        return self.timelines[order[len(order) // 2]]

    @property
    def costs(self) -> Costs:
        """Of all turns."""
        return measured_costs(*self.timelines)

    @property
    def predicted(self) -> Timeline | None:
        """From these costs; None for an order that the simulator refuses."""
        try:
            return simulate(self.typical.timetable, self.costs)
        except PlanError:  # torch's looped BFS has descending microbatches
            return None


def enter(name: str, workload: Workload, timetable: Timetable) -> Entry:
    """zbpp under a timetable: built, and two steps run, to agree on shapes and for its memory. Collective."""
    made: list[Contestant] = []
    peak = _begin(workload, timetable, lambda: Zbpp(workload, timetable), made)
    return Entry(name, Zbpp.runtime, timetable, made[0], peak_bytes=gather(peak))


def attempt(entry: Entry, workload: Workload, make: Callable[[], Contestant]) -> Entry:
    """As `enter`, for one that may fail: then its entry says why, on every rank. Collective."""
    made: list[Contestant] = []
    peak, problem = 0, None
    try:
        peak = _begin(workload, entry.timetable, make, made)
    except Exception as error:  # whatever another's runtime may raise
        problem = (time.time(), _first_line(error))
    if problem is not None:  # here, where the error and what its frames refer to are gone
        for contestant in made:
            contestant.leave()
    everyone = gather((peak, problem))
    failures = sorted(problem for _, problem in everyone if problem is not None)
    if failures:  # the others failed because the first one did
        entry.failure = failures[0][1]
    else:
        entry.contestant, entry.peak_bytes = made[0], [peak for peak, _ in everyone]
    return entry


def _first_line(error: BaseException) -> str:
    """Of what began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _begin(
    workload: Workload, timetable: Timetable, make: Callable[[], Contestant], made: list[Contestant]
) -> int:
    """Its peak on this rank: the stages, what it keeps from step to step, and what its second step needs."""

    def first() -> None:
        made.append(make())
        _warm_up(made[0], workload)

    stages = workload.parameter_bytes(timetable)  # now they exist, and are not counted again
    device = workload.here.device
    with no_collection():
        kept = live_bytes(first, device).after
        needed = live_bytes(lambda: _warm_up(made[0], workload), device).highest
    return stages + kept + needed


def _warm_up(contestant: Contestant, workload: Workload) -> None:
    contestant.step(*workload.batch(contestant.timetable, 0))
    workload.drop_gradients(contestant.timetable)


def race(entries: Sequence[Entry], workload: Workload, num_turns: int) -> None:
    """Turns, each begun by another contestant, a step of each in it; adds to the entries. Collective."""
    for number in range(num_turns):
        first = number % max(1, len(entries))
        with no_collection():
            for entry in (*entries[first:], *entries[:first]):
                _turn(entry, workload, number)


def dismiss(entries: Iterable[Entry]) -> None:
    """They have raced for the last time: their connections close, what was seen of them stays. Collective."""
    for entry in entries:
        if entry.contestant is not None:
            entry.contestant.leave()


def _turn(entry: Entry, workload: Workload, number: int) -> None:
    contestant = entry.contestant
    if contestant is None:
        return
    args, target = workload.batch(contestant.timetable, number)
    workload.synchronise()
    workload.meet()
    begin = time.perf_counter() * 1e3
    contestant.step(args, target)
    workload.synchronise()
    end = time.perf_counter() * 1e3
    workload.drop_gradients(contestant.timetable)
    offset = clock_offset()
    begins, ends = zip(*gather((begin - offset, end - offset)), strict=True)
    entry.walls.append(max(ends) - min(begins))
    entry.timelines.append(contestant.timeline())


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage is collected before, and inside not at all: neither times nor memory depend on when."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

"""When tensors that are held between two actions leave the device, and when they come back.

A ROUND TRIP takes one value out of device memory after the action that makes it and back before the action
that consumes it: saved(s,m) between F and B, deferred(s,m) between B and W. Four instructions do so; c is one
copy on the rank's only stream of copies:

    F ... Offload ... Drop .................... Fetch ... Await B
          [---- c ----]                         [- c -]
          on the device       away              on the device again

Offload and Fetch start a copy, Drop and Await wait for its end; Drop then frees the device memory.

`choose_offload` plans as PipeOffload (arXiv:2503.01328) does: values with the longest lifespan first; among
equal ones, microbatches spread over the step. A copy out takes the earliest free time after the producer, a
copy back the latest one before the consumer. A value whose time on the device is too short for both is left
out. Copies that keep to this plan make no action late.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.dataflow import Value, consumes, produces
from zbpp.schedule.timetable import PlanError, Row, Timetable

if TYPE_CHECKING:
    from zbpp.schedule.simulate import Timeline

_TINY = 1e-9  # ms: sums of the same times may differ by their rounding

HELD = ("saved", "deferred")
"""The values that may leave."""


class Offload(NamedTuple):
    """Start to copy a value out of device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Offload {self.value}"


class Drop(NamedTuple):
    """Wait until a value has been copied out, then free its device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Drop {self.value}"


class Fetch(NamedTuple):
    """Start to copy a value back into device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Fetch {self.value}"


class Await(NamedTuple):
    """Wait until a value is back."""

    value: Value

    def __str__(self) -> str:
        return f"Await {self.value}"


Transport = Offload | Drop | Fetch | Await


class Placed(NamedTuple):
    """An instruction and the position, in its rank's row, of the action that it stands before.

    at_once: directly behind the action before that position; otherwise directly before the action itself.
    A message may be waited for in between.
    """

    before: int
    at_once: bool
    instruction: Transport


RankOffload = tuple[Placed, ...]
"""The round trips of one rank, in the order in which the rank executes their instructions."""


class CopySpan(NamedTuple):
    """One copy, out of the device or back; in ms."""

    value: Value
    rank: int
    is_out: bool
    start: float
    end: float


class _Trip(NamedTuple):
    value: Value
    out: float  # when each copy starts, ms
    back: float
    left: float  # when the copy out ends
    dropped: int  # positions in the row
    fetched: int
    used: int


def choose_offload(
    timeline: Timeline, costs: Costs, limit: float | Sequence[float] = math.inf, *, late: bool = False
) -> tuple[RankOffload, ...]:
    """Choose, for each rank, what leaves and when; `timeline`: the one without offload, of the same costs.

    costs.host is the time of one copy of a stage's saved tensors; what is deferred takes as much less time as
    it is smaller. limit: the most that may be away from a
    rank at a time, in the unit of costs.saved; one number for all ranks or one per rank. late: values leave
    up to the limit even if their copies make an action wait.
    """
    num_ranks = timeline.timetable.num_ranks
    limits = [*limit] if isinstance(limit, Sequence) else [limit] * num_ranks
    if len(limits) != num_ranks:
        raise PlanError(f"limit has {len(limits)} numbers for {num_ranks} ranks")
    stage_costs = costs.per_stage(timeline.timetable.num_stages)
    return tuple(
        _RankChoice(timeline, rank, stage_costs, late).choose(limits[rank]) for rank in range(num_ranks)
    )


def offload_of(timetable: Timetable, values: Iterable[Value]) -> tuple[RankOffload, ...]:
    """The plan in which exactly these values leave: each at once, to be back one action before it is used.

    Raises PlanError for a value that nothing can run in between, or that no rank holds.
    """
    left, ranks = set(values), []
    for row in timetable.rows:
        spans = lifespans(row, timetable.num_stages)
        chosen = {value: span for value, span in spans.items() if value in left}
        left -= chosen.keys()
        trips = [_shortest_trip(value, *span) for value, span in chosen.items()]
        ranks.append(_placed(trips, np.arange(len(row), dtype=np.float64)))
    if left:
        raise PlanError(f"{min(left)} can't leave: only {' or '.join(HELD)} of a stage of this plan can")
    return tuple(ranks)


def _shortest_trip(value: Value, made: int, used: int) -> _Trip:
    """Out at once and back one action before the use. Times are positions."""
    if used - made < 2:
        raise PlanError(f"{value} can't leave: it is used right after it is made")
    fetched = max(made + 2, used - 1)
    dropped = min(made + 2, fetched - 1)
    return _Trip(value, made, fetched - 1, dropped, dropped, fetched, used)


def lifespans(row: Row, num_stages: int) -> dict[Value, tuple[int, int]]:
    """Each value that may leave: the positions of the actions that make and that consume it."""
    made = {
        value: position
        for position, action in enumerate(row)
        for value in produces(action, num_stages)
        if value.name in HELD
    }
    return {
        value: (made[value], position)
        for position, action in enumerate(row)
        for value in consumes(action)
        if value in made
    }


class _RankChoice:
    """The choice for one rank."""

    def __init__(self, timeline: Timeline, rank: int, costs: StageCosts, late: bool) -> None:
        self.row = timeline.timetable.rows[rank]
        self.starts, self.ends = timeline.starts[rank], timeline.ends[rank]
        self.costs = costs
        # A late copy is placed as if it were faster; its Drop and its Await then wait.
        self.shares = (1.0, 0.5, 0.25, 0.0) if late else (1.0,)
        self.num_stages = timeline.timetable.num_stages
        self.busy: list[tuple[float, float]] = []  # times of copies, sorted

    def choose(self, limit: float) -> RankOffload:
        if not any(self.costs.host):
            return ()
        spans = lifespans(self.row, self.num_stages)
        away = _Level()
        trips = []
        for value in sorted(spans, key=lambda value: self._urgency(value, *spans[value])):
            made, used = spans[value]
            size = held_bytes(self.costs, value)
            time = copy_ms(self.costs, value)
            if time <= 0 or size <= 0 or away.most(made, used) + size > limit:
                continue
            trips_that_fit = (self._trip(value, made, used, share * time) for share in self.shares)
            trip = next((trip for trip in trips_that_fit if trip is not None), None)
            if trip is not None:
                trips.append(trip)
                away.add(made, used, size)
        return _placed(trips, self.ends)

    def _urgency(self, value: Value, made: int, used: int) -> tuple[float, int, int]:
        """Sorts by lifespan, longest first; equal ones so that every prefix is spread over the step."""
        lifespan = float(self.starts[used] - self.ends[made])
        return -round(lifespan, 6), int(f"{value.microbatch:032b}"[::-1], 2), value.stage

    def _trip(self, value: Value, made: int, used: int, time: float) -> _Trip | None:
        """The trip if a copy takes this time; None if both copies, and an action between, don't fit."""
        out = self._first_free(float(self.ends[made]), time)
        back = self._last_free(float(self.starts[used]), time)
        dropped = max(made + 1, int(np.searchsorted(self.starts, out + time - _TINY)))
        fetched = min(used, int(np.searchsorted(self.ends, back + _TINY, "right")))
        if dropped >= fetched:  # so it is, too, if the copies would overlap
            return None
        insort(self.busy, (out, out + time))
        insort(self.busy, (back, back + time))
        return _Trip(value, out, back, out + time, dropped, fetched, used)

    def _first_free(self, begin: float, time: float) -> float:
        """The earliest start of a free time of this length, not before `begin`."""
        for start, end in self.busy:
            if end > begin:
                if start >= begin + time - _TINY:
                    break
                begin = end
        return begin

    def _last_free(self, end: float, time: float) -> float:
        """The latest start of a free time of this length that ends by `end`; may be negative."""
        for start, stop in reversed(self.busy):
            if start < end:
                if stop <= end - time + _TINY:
                    break
                end = start
        return end - time


class _Level:
    """How much is away while each action of a row runs."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, float]] = []

    def add(self, made: int, used: int, size: float) -> None:
        insort(self._changes, (made, size))
        insort(self._changes, (used, -size))

    def most(self, made: int, used: int) -> float:
        """The most that is away at a time from `made` to `used`."""
        level = highest = 0.0
        for position, change in self._changes:
            if position >= used:
                break
            level += change
            if position <= made:
                highest = 0.0 if position < made else highest
            highest = max(highest, level)
        return highest


def _placed(trips: Iterable[_Trip], ends: npt.NDArray[np.float64]) -> RankOffload:
    """The instructions of all trips; those that start a copy in the order of the copies."""
    found: list[tuple[float, Placed]] = []
    for value, out, back, left, dropped, fetched, used in trips:
        out_before = int(np.searchsorted(ends, out + _TINY, "right"))
        # The copy that starts at a position has not ended there.
        at_once = dropped > out_before and bool(ends[dropped - 1] >= left - _TINY)
        found += [
            (left, Placed(dropped, at_once, Drop(value))),
            (out, Placed(out_before, True, Offload(value))),
            (back, Placed(fetched, True, Fetch(value))),
            (back, Placed(used, False, Await(value))),
        ]

    def order(each: tuple[float, Placed]) -> tuple[int, bool, bool, float]:
        time, (before, at_once, instruction) = each
        return before, not at_once, not isinstance(instruction, Drop), time

    return tuple(placed for _, placed in sorted(found, key=order))


def copy_ms(costs: StageCosts, value: Value) -> float:
    """The time of one copy of a value: costs.host is for saved, or where saved is 0 for deferred."""
    stage = value.stage
    saved, size = costs.held["saved"][stage], held_bytes(costs, value)
    return costs.host[stage] * (size / saved if saved else 1.0)


def held_bytes(costs: StageCosts, value: Value) -> float:
    """How much a value holds, in the unit of the costs."""
    return costs.held[value.name][value.stage]


class RankCopies:
    """One rank's copies while its row is simulated."""

    def __init__(self, rank: int, placed: RankOffload, costs: StageCosts) -> None:
        self.rank, self._costs = rank, costs
        self._placed: dict[tuple[int, bool], list[Transport]] = defaultdict(list)
        self._ends: dict[tuple[Value, bool], float] = {}
        self._free = 0.0
        self.spans: list[CopySpan] = []
        for before, at_once, instruction in placed:
            self._placed[before, at_once].append(instruction)

    def run(self, position: int, at_once: bool, clock: float) -> float:
        """Run the instructions at a place, `clock` being the time; returns the time when all have ended."""
        for instruction in self._placed.get((position, at_once), ()):
            value = instruction.value
            match instruction:
                case Offload() | Fetch():
                    self._start(value, isinstance(instruction, Offload), clock)
                case Drop() | Await():
                    clock = max(clock, self._ends[value, isinstance(instruction, Drop)])
        return clock

    def _start(self, value: Value, is_out: bool, clock: float) -> None:
        start = max(self._free, clock)
        self._free = self._ends[value, is_out] = start + copy_ms(self._costs, value)
        self.spans.append(CopySpan(value, self.rank, is_out, start, self._free))


def changes_of(placed: RankOffload, costs: StageCosts) -> Iterator[tuple[int, float]]:
    """(position of the action before which the memory changes, by how much)."""
    for before, _, instruction in placed:
        if isinstance(instruction, Drop):
            yield before, -held_bytes(costs, instruction.value)
        elif isinstance(instruction, Fetch):
            yield before, held_bytes(costs, instruction.value)

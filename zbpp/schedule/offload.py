"""Offload of activations, as instructions of a program: which values leave the device, and when.

A ROUND TRIP copies one value out of device memory after the action that produces it, and back before the
action that consumes it: saved(s,m) between F and B, deferred(s,m) between B and W. A round trip is four
instructions. A rank has one copy stream; c is the time of one copy on it:

    F ... Offload ... Drop .................... Fetch ... Await B
          [---- c ----]                         [- c -]
          on the device       away              on the device again

Offload and Fetch start a copy. Drop and Await wait for the end of a copy; Drop then frees the device memory.

`choose_offload` plans as PipeOffload (arXiv:2503.01328) does. It takes the values with the longest lifespan
first; among values of equal lifespan, it spreads the microbatches over the step. The copy out runs in the
first free interval of the copy stream after the producer, the copy back in the last free interval before the
consumer. A value stays if its lifespan is too short for both copies. With `late=False` no action waits for a
copy, as long as the copies take the planned times.
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

_TINY = 1e-9  # ms: two sums of the same times may differ by rounding

HELD = ("saved", "deferred")
"""The names of the values that may leave the device."""


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
    """Wait until a value is back in device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Await {self.value}"


Transport = Offload | Drop | Fetch | Await


class Placed(NamedTuple):
    """An instruction and its place between two actions of its rank's row.

    before: the position of the action after the instruction. at_once: whether the rank executes the
    instruction directly after the previous action, or directly before the action at `before`. Between these
    two places the rank may wait for a message.
    """

    before: int
    at_once: bool
    instruction: Transport


RankOffload = tuple[Placed, ...]
"""The instructions of one rank's round trips, in the order in which the rank executes them."""


class CopySpan(NamedTuple):
    """When one copy, out of the device or back, started and ended, in ms."""

    value: Value
    rank: int
    is_out: bool
    start: float
    end: float


class _Trip(NamedTuple):
    """One round trip. Times in ms; the positions are those of actions in the rank's row."""

    value: Value
    out: float  # time at which the copy out starts
    back: float  # time at which the copy back starts
    out_end: float  # time at which the copy out ends
    dropped: int  # Drop stands before the action at this position
    fetched: int  # Fetch stands before the action at this position
    used: int  # position of the action that consumes the value


def choose_offload(
    timeline: Timeline, costs: Costs, limit: float | Sequence[float] = math.inf, *, late: bool = False
) -> tuple[RankOffload, ...]:
    """Choose, for each rank, which values leave, and when.

    timeline: the simulated step without offload, under the same costs. costs.host: the time of one copy of a
    stage's saved tensors; a copy of its deferred tensors takes deferred/saved of this time. limit: the most
    that may be away from a rank at a time, in the unit of costs.saved; one number for all ranks, or one per
    rank. late: a value leaves even if an action waits for its copies, up to the limit.
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
    """The plan in which exactly these values leave.

    The copy out of a value starts right after its producer; its Await stands right before its consumer, and
    its Fetch at least one action earlier where there is room. Raises PlanError for a value whose consumer
    follows its producer at once, and for a value that no rank of this timetable holds.
    """
    left, ranks = set(values), []
    for row in timetable.rows:
        spans = lifespans(row, timetable.num_stages)
        chosen = {value: span for value, span in spans.items() if value in left}
        left -= chosen.keys()
        trips = [_shortest_trip(value, *span) for value, span in chosen.items()]
        ranks.append(_placed(trips, np.arange(len(row), dtype=np.float64)))
    if left:
        raise PlanError(
            f"{min(left)} can't leave the device: write {' or '.join(HELD)}, and a stage and a microbatch of "
            "this timetable"
        )
    return tuple(ranks)


def _shortest_trip(value: Value, made: int, used: int) -> _Trip:
    """The round trip that starts after `made`, and fetches one action before `used`. Times are positions."""
    if used - made < 2:
        raise PlanError(f"{value} can't leave the device: its consumer runs right after its producer")
    fetched = max(made + 2, used - 1)
    dropped = min(made + 2, fetched - 1)
    return _Trip(value, made, fetched - 1, dropped, dropped, fetched, used)


def lifespans(row: Row, num_stages: int) -> dict[Value, tuple[int, int]]:
    """{value that may leave: (position of its producer, position of its consumer)}, in this row."""
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
    """Chooses the round trips of one rank."""

    def __init__(self, timeline: Timeline, rank: int, costs: StageCosts, late: bool) -> None:
        self.row = timeline.timetable.rows[rank]
        self.starts, self.ends = timeline.starts[rank], timeline.ends[rank]
        self.costs = costs
        # With `late`, a copy that does not fit is planned with a share of its time; its Drop and its Await
        # then wait for the rest.
        self.shares = (1.0, 0.5, 0.25, 0.0) if late else (1.0,)
        self.num_stages = timeline.timetable.num_stages
        self.busy: list[tuple[float, float]] = []  # (start, end) of the planned copies, sorted

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
        """A sort key: the longest lifespan first; among equal lifespans, microbatches in bit-reversed order.

        Of microbatches in bit-reversed order, the first n are spread over the step for every n.
        """
        lifespan = float(self.starts[used] - self.ends[made])
        return -round(lifespan, 6), int(f"{value.microbatch:032b}"[::-1], 2), value.stage

    def _trip(self, value: Value, made: int, used: int, time: float) -> _Trip | None:
        """The round trip whose copies take `time` each; None if no action runs between the two copies."""
        out = self._first_free(float(self.ends[made]), time)
        back = self._last_free(float(self.starts[used]), time)
        dropped = max(made + 1, int(np.searchsorted(self.starts, out + time - _TINY)))
        fetched = min(used, int(np.searchsorted(self.ends, back + _TINY, "right")))
        if dropped >= fetched:  # this holds, too, if the two copies would overlap
            return None
        insort(self.busy, (out, out + time))
        insort(self.busy, (back, back + time))
        return _Trip(value, out, back, out + time, dropped, fetched, used)

    def _first_free(self, begin: float, time: float) -> float:
        """The start of the first free interval of length `time` that does not start before `begin`."""
        for start, end in self.busy:
            if end > begin:
                if start >= begin + time - _TINY:
                    break
                begin = end
        return begin

    def _last_free(self, end: float, time: float) -> float:
        """The start of the last free interval of length `time` that ends by `end`; may be negative."""
        for start, stop in reversed(self.busy):
            if start < end:
                if stop <= end - time + _TINY:
                    break
                end = start
        return end - time


class _Level:
    """How much has left the device, at each position of a row."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, float]] = []

    def add(self, made: int, used: int, size: float) -> None:
        insort(self._changes, (made, size))
        insort(self._changes, (used, -size))

    def most(self, made: int, used: int) -> float:
        """The most that has left at any position from `made` to `used`."""
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
    """The instructions of all round trips, in the order in which the rank executes them.

    Offloads and Fetches at one place are in the order of their copies. ends: when each action ends.
    """
    found: list[tuple[float, Placed]] = []
    for value, out, back, out_end, dropped, fetched, used in trips:
        out_before = int(np.searchsorted(ends, out + _TINY, "right"))
        # A copy that starts after an action can't have ended at the same place.
        at_once = dropped > out_before and bool(ends[dropped - 1] >= out_end - _TINY)
        found += [
            (out_end, Placed(dropped, at_once, Drop(value))),
            (out, Placed(out_before, True, Offload(value))),
            (back, Placed(fetched, True, Fetch(value))),
            (back, Placed(used, False, Await(value))),
        ]

    def order(each: tuple[float, Placed]) -> tuple[int, bool, bool, float]:
        time, (before, at_once, instruction) = each
        return before, not at_once, not isinstance(instruction, Drop), time

    return tuple(placed for _, placed in sorted(found, key=order))


def copy_ms(costs: StageCosts, value: Value) -> float:
    """The time of one copy of a value.

    costs.host is the time for a stage's saved tensors; for its deferred tensors if it saves none.
    """
    stage = value.stage
    saved, size = costs.held["saved"][stage], held_bytes(costs, value)
    return costs.host[stage] * (size / saved if saved else 1.0)


def held_bytes(costs: StageCosts, value: Value) -> float:
    """The memory that a value holds, in the unit of the costs (bytes or activations)."""
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
        """Run the instructions at one place (see Placed) from time `clock` on; returns when they end."""
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
    """For each Drop and Fetch: (position of the action after it, change of the device memory)."""
    for before, _, instruction in placed:
        if isinstance(instruction, Drop):
            yield before, -held_bytes(costs, instruction.value)
        elif isinstance(instruction, Fetch):
            yield before, held_bytes(costs, instruction.value)

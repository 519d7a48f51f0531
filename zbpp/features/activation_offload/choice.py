"""Chooses by costs which values leave the device, as PipeOffload (arXiv:2503.01328) does.

The values with the longest lifespan leave first; among values of equal lifespan, the choice spreads the
microbatches over the step. The copy out runs in the first free interval of the copy stream after the
producer, the copy back in the last free interval before the consumer. A value stays if its lifespan is too
short for both copies. With `late=False` no action waits for a copy, as long as the copies take the planned
times. See copies.py for the instructions.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.features.activation_offload.copies import Await, Drop, Fetch, Offload, Placed, RankOffload
from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.dataflow import Value, consumes, produces
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import Row

_TINY = 1e-9  # ms: two sums of the same times may differ by rounding


def choose_rank_offload(
    timeline: Timeline, rank: int, costs: Costs, limit: float = math.inf, *, late: bool = False
) -> RankOffload:
    """Choose which values leave a rank, and when; it depends on no other rank's choice.

    timeline: the simulated step without offload, under the same costs. limit: the most that may be away from
    the rank at a time, in the unit of costs.saved. late: a value leaves even if an action waits for its
    copies, up to the limit.
    """
    stage_costs = costs.of_units(timeline.timetable)
    return _RankChoice(timeline, rank, stage_costs, late).choose(limit)


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
        spans = _lifespans(self.row, self.num_stages)
        away = _Level()
        trips = []
        for value in sorted(spans, key=lambda value: self._urgency(value, *spans[value])):
            made, used = spans[value]
            length = self.costs.length(value.microbatch)
            size = self.costs.held["saved"][value.stage] * length
            time = self.costs.host[value.stage] * length
            if time <= 0 or size <= 0 or away.most(made, used) + size > limit:
                continue
            trips_that_fit = (self._trip(value, made, used, share * time) for share in self.shares)
            trip = next((trip for trip in trips_that_fit if trip is not None), None)
            if trip is not None:
                trips.append(trip)
                away.add(made, used, size)
        return _instructions_of(trips, self.ends)

    def _urgency(self, value: Value, made: int, used: int) -> tuple[float, int, int]:
        """A sort key: the longest lifespan first; among equal lifespans, microbatches in bit-reversed order.

        Of microbatches in bit-reversed order, the first n are spread over the step for every n.
        """
        lifespan = float(self.starts[used] - self.ends[made])
        return -round(lifespan, 6), int(f"{value.microbatch:032b}"[::-1], 2), value.stage

    def _trip(self, value: Value, made: int, used: int, time: float) -> _RoundTrip | None:
        """The round trip whose copies take `time` each; None if no action runs between the two copies."""
        out = self._first_free(float(self.ends[made]), time)
        back = self._last_free(float(self.starts[used]), time)
        # An action without a duration may begin when the copy ends, and yet stand before the copy.
        dropped = max(_first_after(self.ends, out), int(np.searchsorted(self.starts, out + time - _TINY)))
        fetched = min(used, _first_after(self.ends, back))
        if dropped >= fetched:  # this holds, too, if the two copies would overlap
            return None
        insort(self.busy, (out, out + time))
        insort(self.busy, (back, back + time))
        return _RoundTrip(value, out, back, out + time, dropped, fetched, used)

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


class _RoundTrip(NamedTuple):
    """One round trip. Times in ms; the positions are those of actions in the rank's row."""

    value: Value
    out: float  # time at which the copy out starts
    back: float  # time at which the copy back starts
    out_end: float  # time at which the copy out ends
    dropped: int  # Drop stands before the action at this position
    fetched: int  # Fetch stands before the action at this position
    used: int  # position of the action that consumes the value


def _lifespans(row: Row, num_stages: int) -> dict[Value, tuple[int, int]]:
    """{value that may leave: (position of its producer, position of its consumer)}, in this row."""
    made = {
        value: position
        for position, action in enumerate(row)
        for value in produces(action, num_stages)
        if value.name == "saved"
    }
    return {
        value: (made[value], position)
        for position, action in enumerate(row)
        for value in consumes(action)
        if value in made
    }


def _first_after(ends: npt.NDArray[np.float64], time: float) -> int:
    """The position of the first action that ends after this time."""
    return int(np.searchsorted(ends, time + _TINY, "right"))


def _instructions_of(trips: Iterable[_RoundTrip], ends: npt.NDArray[np.float64]) -> RankOffload:
    """The instructions of all round trips, in the order in which the rank executes them.

    Offloads and Fetches at one place are in the order of their copies. ends: when each action ends.
    """
    found: list[tuple[float, Placed]] = []
    for value, out, back, out_end, dropped, fetched, used in trips:
        out_before = _first_after(ends, out)
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

"""Round trips of values, and the places of their instructions in a rank's row (see offload.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.schedule.dataflow import Value, consumes, produces
from zbpp.schedule.offload import HELD, Await, Drop, Fetch, Offload, Placed, RankOffload
from zbpp.schedule.timetable import PlanError, Row, Timetable

TINY = 1e-9  # ms: two sums of the same times may differ by rounding


class RoundTrip(NamedTuple):
    """One round trip. Times in ms; the positions are those of actions in the rank's row."""

    value: Value
    out: float  # time at which the copy out starts
    back: float  # time at which the copy back starts
    out_end: float  # time at which the copy out ends
    dropped: int  # Drop stands before the action at this position
    fetched: int  # Fetch stands before the action at this position
    used: int  # position of the action that consumes the value


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


def instructions_of(trips: Iterable[RoundTrip], ends: npt.NDArray[np.float64]) -> RankOffload:
    """The instructions of all round trips, in the order in which the rank executes them.

    Offloads and Fetches at one place are in the order of their copies. ends: when each action ends.
    """
    found: list[tuple[float, Placed]] = []
    for value, out, back, out_end, dropped, fetched, used in trips:
        out_before = int(np.searchsorted(ends, out + TINY, "right"))
        # A copy that starts after an action can't have ended at the same place.
        at_once = dropped > out_before and bool(ends[dropped - 1] >= out_end - TINY)
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
        ranks.append(instructions_of(trips, np.arange(len(row), dtype=np.float64)))
    if left:
        raise PlanError(
            f"{min(left)} can't leave the device: write {' or '.join(HELD)}, and a stage and a microbatch of "
            "this timetable"
        )
    return tuple(ranks)


def _shortest_trip(value: Value, made: int, used: int) -> RoundTrip:
    """The round trip that starts after `made`, and fetches one action before `used`. Times are positions."""
    if used - made < 2:
        raise PlanError(f"{value} can't leave the device: its consumer runs right after its producer")
    fetched = max(made + 2, used - 1)
    dropped = min(made + 2, fetched - 1)
    return RoundTrip(value, made, fetched - 1, dropped, dropped, fetched, used)

"""A sharper bound on idle time before the first B: a rank runs WHOLE F's, and a late B makes others late.

Suppose a plan attains the target T. T leaves each rank some idle time h before its first B: T less the time
before its first F, less its work, less its least idle time in the tail and after (see `idle_bound`).
A rank whose first B starts t after its first F has run k whole F's until then, so t lies in [k f, k f + h].
The gaps between these intervals can't be used. So if the rank's g arrives no earlier than L, its first B
starts no earlier than the least t >= L in any interval whose k F's memory can hold. Its own g leaves that
much later, which delays the arrival on the ranks below:

    rank 2          F F . B           k = 2, h = 1: L = 2.5 is within [2, 3]
    rank 1      F F F . . | B         k = 3, L = 4.5 is in no interval if memory holds 3: T fails

A span counts from the rank's own first F. So a delay of rank j counts for rank i only if i starts before j
(its lowest stage is lower) and gets its first g after j (its highest stage is lower). The makespan counts
from the first start of all, so that a delay reaches every rank below. If no rank fails, T may be attainable.
The largest T that fails is the bound. A rank that does not fail at T does not fail at a larger T, so
bisection finds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zbpp.planning.bounds.idle_bound import Idle
from zbpp.planning.bounds.relaxation import Relaxation
from zbpp.planning.options import MAKESPAN, ROUNDING

_BISECTIONS = 60


class _WarmUp(NamedTuple):
    """What decides when a rank's first B starts. Times count from the start of the objective's clock."""

    fixed: float  # what the target must hold in any case: the time before the first F, and the work
    opening: float  # when its first F starts, at the earliest
    arrival: float  # when its first g arrives, at the earliest
    idle: Idle
    above: list[int]  # the warm-ups whose delay reaches this rank, as places in the list


def late_first_b(relaxation: Relaxation, idles: Sequence[Idle], objective: str, floor: float) -> float:
    """The largest target that fails (ms), or `floor` if every target above it may be attainable."""
    warm_ups = _warm_ups(relaxation, idles, objective)
    if _attainable(warm_ups, floor):
        return floor
    low, high = floor, floor * (1 + ROUNDING) + sum(warm_up.arrival for warm_up in warm_ups)
    while not _attainable(warm_ups, high):
        high += high - low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _attainable(warm_ups, middle) else (middle, high)
    return low


def _warm_ups(relaxation: Relaxation, idles: Sequence[Idle], objective: str) -> list[_WarmUp]:
    """The warm-ups, that of the rank with the highest stage first: delays travel in this order."""
    order = sorted(range(relaxation.problem.num_ranks), key=relaxation.highest, reverse=True)
    warm_ups = []
    for index, rank in enumerate(order):
        if objective == MAKESPAN:
            first_f = relaxation.first_f(rank)
            fixed, opening, arrival = relaxation.work(rank) + first_f, first_f, relaxation.first_b(rank)
            above = [index - 1] if index else []
        else:
            fixed, opening, arrival = relaxation.work(rank), 0.0, relaxation.until_first_b(rank)
            above = _neighbours(relaxation, order, index)
        warm_ups.append(_WarmUp(fixed, opening, arrival, idles[rank], above))
    return warm_ups


def _neighbours(relaxation: Relaxation, order: list[int], index: int) -> list[int]:
    """The nearest ranks that start later and get their first g earlier, as places in `order`.

    No other rank need be looked at: its delay has already delayed one of these.
    """
    found, bar = [], math.inf
    for above in range(index - 1, -1, -1):
        lowest = relaxation.lowest(order[above])
        if relaxation.lowest(order[index]) < lowest < bar:
            found.append(above)
            bar = lowest
    return found


def _attainable(warm_ups: list[_WarmUp], target: float) -> bool:
    delays: list[float] = []  # of each first B, beyond the arrival of its g
    for warm_up in warm_ups:
        delay = max([0.0, *(delays[above] for above in warm_up.above)])
        start = _first_b(warm_up, warm_up.arrival + delay, target - warm_up.fixed)
        if start is None:
            return False
        delays.append(start - warm_up.arrival)
    return True


def _first_b(warm_up: _WarmUp, arrival: float, spare: float) -> float | None:
    """The earliest start of the first B from `arrival` on if the rank may idle for `spare`; else None."""
    idle = warm_up.idle
    starts = []
    if not idle.is_one_microbatch:
        starts.append(_between_forwards(idle, arrival - warm_up.opening, spare - idle.rest))
    if idle.may_run_all_forwards and idle.all_forwards_first <= spare:
        before = max(arrival - warm_up.opening, idle.forward_work)
        starts.append(before if before - idle.forward_work <= spare else None)
    return min((warm_up.opening + start for start in starts if start is not None), default=None)


def _between_forwards(idle: Idle, arrival: float, spare: float) -> float | None:
    """The least time from `arrival` on that is within `spare` after some number of whole F's."""
    if spare < 0:
        return None
    each, most = idle.stages[0].f, idle.most_forwards
    if not idle.alike or each == 0:
        return arrival if arrival <= idle.forwards_before_b + spare else None
    done = min(int(arrival / each + ROUNDING), most)
    if arrival <= done * each + spare:
        return arrival
    return (done + 1) * each if done < most else None

"""A sharper bound on idle time before the first B: a rank runs WHOLE F's, and a late B makes others late.

Suppose a plan attains the target T. T leaves each rank some idle time h before its first B: T less the time
before its first F, less its work, less its least idle time in the tail and after (see `idle_bound`).
A rank whose first B starts t after its first F has run k whole F's until then, so t lies in [k f, k f + h].
The gaps between these intervals can't be used. So if the rank's g arrives no earlier than L, its first B
starts no earlier than the least t >= L in any interval whose k F's memory can hold. Its own g leaves that
much later, which delays the arrival on the ranks below:

    rank 2          F F . B           k = 2, h = 1: L = 2.5 is within [2, 3]
    rank 1      F F F . . | B         k = 3, L = 4.5 is in no interval if memory holds 3: T fails

A span counts from the rank's own first F: a delay passes from rank j to rank i if i starts before j (its
lowest stage is lower) and gets its first g after j. The makespan counts from the first start of all, so that
a delay reaches every rank below. If no rank fails, T may be attainable. The largest T that fails is the
bound. With more idle time no rank fails sooner, so bisection finds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zbpp.planning.bounds.idle_bound import Idle
from zbpp.planning.bounds.relaxation import Relaxation
from zbpp.planning.objective import MAKESPAN
from zbpp.planning.tolerance import ROUNDING

_STEPS = 60


class _Head(NamedTuple):
    """What decides when a rank's first B starts. Times count from the start of the objective's clock."""

    fixed: float  # idle time before the first F, and work: the rest of the target T may be lost
    opening: float  # when its first F starts, at the earliest
    arrival: float  # when its first g arrives, at the earliest
    idle: Idle
    above: list[int]  # the heads whose delay reaches this rank, as places in the list of heads


def late_first_b(relaxation: Relaxation, idles: Sequence[Idle], objective: str, floor: float) -> float:
    """The largest target that fails (ms), or `floor` if every target above it may be attainable."""
    heads = _heads(relaxation, idles, objective)
    if _attainable(heads, floor):
        return floor
    low, high = floor, floor * (1 + ROUNDING) + sum(head.arrival for head in heads)
    while not _attainable(heads, high):
        high += high - low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _attainable(heads, middle) else (middle, high)
    return low


def _heads(relaxation: Relaxation, idles: Sequence[Idle], objective: str) -> list[_Head]:
    """The heads, that of the rank with the highest stage first: delays travel in this order."""
    order = sorted(range(relaxation.problem.num_ranks), key=relaxation.highest, reverse=True)
    heads = []
    for index, rank in enumerate(order):
        first_f, first_b = relaxation.first_f(rank), relaxation.b_start[relaxation.highest(rank)]
        if objective == MAKESPAN:
            fixed, opening, arrival = relaxation.work(rank) + first_f, first_f, first_b
            above = [index - 1] if index else []
        else:
            fixed, opening, arrival = relaxation.work(rank), 0.0, first_b - first_f
            above = _neighbours(relaxation, order, index)
        heads.append(_Head(fixed, opening, arrival, idles[rank], above))
    return heads


def _neighbours(relaxation: Relaxation, order: list[int], index: int) -> list[int]:
    """The nearest ranks that start later and get their first g earlier, as places in `order`.

    The delay of a rank further away has reached one of these.
    """
    found, bar = [], math.inf
    for above in range(index - 1, -1, -1):
        lowest = relaxation.lowest(order[above])
        if relaxation.lowest(order[index]) < lowest < bar:
            found.append(above)
            bar = lowest
    return found


def _attainable(heads: list[_Head], target: float) -> bool:
    delays: list[float] = []  # of each first B, beyond the arrival of its g
    for head in heads:
        delay = max([0.0, *(delays[above] for above in head.above)])
        start = _first_b(head, head.arrival + delay, target - head.fixed)
        if start is None:
            return False
        delays.append(start - head.arrival)
    return True


def _first_b(head: _Head, arrival: float, spare: float) -> float | None:
    """The earliest start of the first B from `arrival` on if the rank may idle for `spare`; else None."""
    idle = head.idle
    starts = []
    if idle.number > 1:
        starts.append(_between_forwards(idle, arrival - head.opening, spare - idle.rest))
    if idle.may_run_all_forwards and idle.all_forwards_first <= spare:
        before = max(arrival - head.opening, idle.forward_work)
        starts.append(before if before - idle.forward_work <= spare else None)
    return min((head.opening + start for start in starts if start is not None), default=None)


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

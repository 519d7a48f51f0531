"""Sharper heads: before its first B a rank runs WHOLE F's, and a B that is late makes others late.

Suppose a plan attains the target T. A rank whose first B starts t after its first F
has run k whole F's till then, so that t lies in [k f, k f + h], where h is the idle time that T
leaves it: T less its lead, its work, and its least idle time in the tail and after (idle.py). The
gaps between these intervals can't be used. So if messages let its first B start no earlier than L,
it starts no earlier than the least t >= L in any interval, k within memory; and its own
g goes down that much later, which raises L on the ranks below:

    rank 2          F F . B           k = 2, h = 1: L = 2.5 is within [2, 3]
    rank 1      F F F . . | B         k = 3, L = 4.5 is in no interval if memory holds 3: T fails

Spans count from a rank's own first F: a delay passes from rank j to rank i if i starts before j
(its first stage is lower) and gets its first g after j. The makespan counts from the start
of all, so that there a delay reaches every rank below. If no rank fails, T may be
attainable; the largest T that fails is the bound. Less idle time never helps, so bisection finds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zbpp.planning.bounds.idle_bound import Idle
from zbpp.planning.bounds.relaxed import ROUNDING, Relaxed

_STEPS = 60


class _Head(NamedTuple):
    """What decides when a rank's first B starts."""

    fixed: float  # lead and work: T less this may be lost
    opening: float  # the clock at its first F, the least
    arrival: float  # the clock at the first g, by the chain alone
    position: float  # of the rank's first B in the chain: what separates it from another's
    idle: Idle
    above: list[int]  # ranks whose delay reaches this one, in the list of heads


def late_first_b(problem: Relaxed, idles: Sequence[Idle], objective: str, floor: float) -> float:
    """The largest target that fails, in ms, or `floor` if all above it may be attainable."""
    heads = _heads(problem, idles, objective)
    if _attainable(heads, floor):
        return floor
    low, high = floor, floor * (1 + ROUNDING) + sum(head.arrival for head in heads)
    while not _attainable(heads, high):
        high += high - low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if _attainable(heads, middle) else (middle, high)
    return low


def _heads(problem: Relaxed, idles: Sequence[Idle], objective: str) -> list[_Head]:
    """The heads, highest first B first: as delays travel."""
    makespan = objective == "makespan"
    order = sorted(range(problem.num_ranks), key=problem.last, reverse=True)
    heads = []
    for index, rank in enumerate(order):
        lead, high = problem.down[problem.first(rank)], problem.last(rank)
        origin = 0.0 if makespan else lead
        heads.append(
            _Head(
                fixed=problem.work(rank) + (lead if makespan else 0.0),
                opening=lead - origin,
                arrival=problem.until_first_b(rank) + lead - origin,
                position=problem.up[high] + problem.stages[high].b + origin,
                idle=idles[rank],
                above=list(range(index))[-1:] if makespan else _neighbours(problem, order, index),
            )
        )
    return heads


def _neighbours(problem: Relaxed, order: list[int], index: int) -> list[int]:
    """The nearest ranks that start later and get their first g earlier; delays of others pass these."""
    found, bar = [], math.inf
    for above in range(index - 1, -1, -1):
        first = problem.first(order[above])
        if problem.first(order[index]) < first < bar:
            found.append(above)
            bar = first
    return found


def _attainable(heads: list[_Head], target: float) -> bool:
    starts: list[float] = []
    for head in heads:
        passed = (starts[j] + heads[j].position - head.position for j in head.above)
        start = _first_b(head, max([head.arrival, *passed]), target - head.fixed)
        if start is None:
            return False
        starts.append(start)
    return True


def _first_b(head: _Head, arrival: float, spare: float) -> float | None:
    """The earliest start of the first B from `arrival` on, if the rank may lose `spare` in all."""
    idle = head.idle
    starts = []
    if idle.number > 1:
        starts.append(_between_forwards(idle, arrival - head.opening, spare - idle.rest))
    if idle.may_run_all_forwards and idle.all_forwards_first <= spare:
        before = max(arrival - head.opening, idle.forward_work)
        starts.append(before if before - idle.forward_work <= spare else None)
    return min((head.opening + start for start in starts if start is not None), default=None)


def _between_forwards(idle: Idle, arrival: float, spare: float) -> float | None:
    """The least time >= arrival within `spare` after some number of whole F's."""
    if spare < 0:
        return None
    each, most = idle.stages[0].f, idle.most_forwards
    if not idle.alike or each == 0:
        return arrival if arrival <= idle.forwards_before_b + spare else None
    done = min(int(arrival / each + 1e-12), most)
    if arrival <= done * each + spare:
        return arrival
    return (done + 1) * each if done < most else None

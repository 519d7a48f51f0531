"""What improves a timed plan and never makes it longer: random moves and justification.

**Random moves.** An action on the critical path moves a few places along its rank. Moves that change nothing
are kept, too: of two plans of equal length, one may be possible to shorten and the other not. (Accepting a
longer plan now and then, as in annealing, moved nothing.)

**Justification**, known from project scheduling as forward-backward improvement. Timed as early as possible,
a plan has gaps where ranks wait for messages; an F or W from further on that fits into a gap may go there.
Timed as late as possible the plan has other gaps, and the same is done in mirror image. A few rounds of both
close far more gaps than single moves do: an early F on one rank pays only when the other ranks have moved
theirs, too.
"""

from __future__ import annotations

import random

from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.incremental_timing import IncrementalTiming
from zbpp.planning.search.plan_graph import Paths

_LONGEST_MOVE = 24  # places; longer moves are hardly ever kept
_CRITICAL = 0.9  # share of the moves that start on a longest path: no other move can shorten it
_REFRESH_INTERVAL = 20  # kept moves after which `order` is sorted again


def move_at_random(
    timing: IncrementalTiming, rng: random.Random, num_moves: int, deadline: Deadline, goal: float
) -> None:
    """Try `num_moves` moves, and stop at `goal`."""
    tolerance = timing.problem.tolerance
    best = timing.value
    num_kept = 0
    for _ in range(num_moves):
        if best <= goal or deadline.over:
            return
        if not _move(timing, rng, best + tolerance):
            continue
        num_kept += 1
        if num_kept % _REFRESH_INTERVAL == 0:
            timing.refresh()
        best = min(best, timing.value)


def _move(timing: IncrementalTiming, rng: random.Random, max_value: float) -> bool:
    """Move a random action, on a longest path more often than not, to a random place that is near."""
    must_be_critical = rng.random() < _CRITICAL
    a = rng.choice(timing.order)
    while must_be_critical and not timing.is_critical(a):
        a = rng.choice(timing.order)
    at = timing.index[a]
    low, high = timing.feasible_range(a)
    low, high = max(low, at - _LONGEST_MOVE), min(high, at + _LONGEST_MOVE)
    if low == high:
        return False
    other = rng.randrange(low, high)  # one of the places but `at`
    return timing.move(a, other if other < at else other + 1, max_value)


_LEFT, _RIGHT = -1, 1


def justify(timing: IncrementalTiming, deadline: Deadline, most_rounds: int = 6) -> None:
    """Push left, then right, until a round does not lower the objective, at most `most_rounds` times."""
    for _ in range(most_rounds):
        before = timing.value
        push(timing, timing.from_start, _LEFT, deadline)
        push(timing, timing.to_end, _RIGHT, deadline)
        if timing.value >= before - timing.problem.tolerance or deadline.over:
            return


def push(timing: IncrementalTiming, paths: Paths, direction: int, deadline: Deadline) -> None:
    """Move each action to the gap furthest to the left that can hold it, or to the right.

    To the left: paths from the start, direction -1. To the right (paths to the end, direction 1) the same is
    done as seen from the end of the plan: times are distances from the end, and the last actions come first.
    """
    length, neighbour, partner, latency = paths
    duration, tolerance = timing.duration, timing.problem.tolerance
    for a in sorted(timing.order, key=lambda a: length[a] - duration[a]):
        ready = length[partner[a]] + latency[a]  # when its message is there
        if ready + duration[a] > length[a] - tolerance:
            continue  # it starts as soon as its message is there
        row, at = timing.rows[timing.rank_of_action[a]], timing.index[a]
        furthest = timing.feasible_range(a)[0 if direction == _LEFT else 1]
        to = at
        ends = ready + duration[a] - tolerance  # of the action, at the earliest
        while to != furthest and _start(timing, length, row[to + direction]) >= ends:
            to += direction
        while to != at:
            opens = max(length[neighbour[row[to]]], ready)
            closes = _start(timing, length, row[to])
            fits = opens + duration[a] <= closes + tolerance
            if fits and timing.move(a, to, timing.value + tolerance):
                break
            to -= direction
        if deadline.over:
            break
    timing.refresh()


def _start(timing: IncrementalTiming, length: list[float], a: int) -> float:
    return length[a] - timing.duration[a]

"""Random moves along the critical path; a move that makes the plan no longer is kept."""

from __future__ import annotations

import random

from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.fuse_backward import fuse_or_split, fusible
from zbpp.planning.search.incremental_timing import IncrementalTiming

_LONGEST_MOVE = 24  # places; longer moves are hardly ever kept
_CRITICAL = 0.9  # share of the moves that start on a longest path: no other move can shorten it
# The share of the moves that fuse or split a backward, where that can pay. Each of these moves takes a pass
# over the plan, so in a plan of n actions their share is _FUSED_ACTIONS / n at most.
_FUSIONS = 0.05
_FUSED_ACTIONS = 20
_REFRESH_INTERVAL = 20  # kept moves after which `order` is sorted again


def move_at_random(
    timing: IncrementalTiming, rng: random.Random, num_moves: int, deadline: Deadline, goal: float
) -> None:
    """Try `num_moves` moves, and stop at `goal`.

    Moves that change nothing are kept, too: of two plans of equal length, one may be possible to shorten
    and the other not. (Accepting a longer plan now and then, as in annealing, moved nothing.)
    """
    tolerance = timing.problem.tolerance
    best = timing.value
    forwards = fusible(timing)
    share_of_fusions = min(_FUSIONS, _FUSED_ACTIONS / len(timing.order)) if forwards else 0.0
    num_kept = 0
    for _ in range(num_moves):
        if best <= goal or deadline.over:
            return
        max_value = best + tolerance
        if forwards and rng.random() < share_of_fusions:
            kept = fuse_or_split(timing, rng.choice(forwards), rng, max_value)
        else:
            kept = _move(timing, rng, max_value)
        if not kept:
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

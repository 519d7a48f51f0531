"""Simulated annealing: random moves along the critical path, the longer plan accepted now and then."""

from __future__ import annotations

import random

from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.fuse_backward import fuse_or_split, fusible
from zbpp.planning.search.incremental_timing import IncrementalTiming

_LONGEST_MOVE = 24  # places; longer moves are hardly ever kept
_CRITICAL = 0.9  # share of the moves that start on a longest path: no other move can shorten it
_FUSIONS = 0.05  # share of the moves that fuse or split a backward, where that can pay;
_FUSED_ACTIONS = 20  # at most this / number of actions, since each of these moves takes a pass over the plan
_REFRESH_INTERVAL = 20  # kept moves after which `order` is sorted again


def anneal(
    timing: IncrementalTiming,
    rng: random.Random,
    num_moves: int,
    temperature: float,
    deadline: Deadline,
    goal: float,
) -> None:
    """Try `num_moves` moves; `timing` is left at the best plan met. Stops at `goal`.

    A move is accepted up to a limit: the present objective plus an exponential variable times the
    temperature (ms), which falls to 0 over the moves. The limit is drawn before the move is timed, so
    that timing can stop early. Moves that change nothing are kept, too: of two plans of equal length,
    one may be possible to shorten and the other not.
    """
    tolerance = timing.problem.tolerance
    best, best_rows = timing.value, [list(row) for row in timing.rows]
    forwards = fusible(timing)
    share_of_fusions = min(_FUSIONS, _FUSED_ACTIONS / len(timing.order)) if forwards else 0.0
    num_kept = 0
    for step in range(num_moves):
        if best <= goal or deadline.over:
            break
        slack = temperature * (1 - step / num_moves) * rng.expovariate(1.0) + tolerance
        limit = timing.value + slack
        if forwards and rng.random() < share_of_fusions:
            kept = fuse_or_split(timing, rng.choice(forwards), rng, limit)
        else:
            kept = _move(timing, rng, limit)
        if not kept:
            continue
        num_kept += 1
        if num_kept % _REFRESH_INTERVAL == 0:
            timing.refresh()
        if timing.value < best - tolerance:
            best, best_rows = timing.value, [list(row) for row in timing.rows]
    if timing.value > best + tolerance:
        timing.rows = best_rows
        timing.rebuild()


def _move(timing: IncrementalTiming, rng: random.Random, limit: float) -> bool:
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
    return timing.move(a, other if other < at else other + 1, limit)

"""Postpone W's, so that they are pending when F and B exchange tokens among experts.

    rank 0   F2 B0 W0 F3 B1 W1 F4 B2 W2      families run a W as soon as they can: none is pending in F and B
             F2 B0 F3 B1 W0 F4 B2 W1 W2      one place later: W0 runs in the exchanges of F3 and B1

A W at the place of the rank's next W costs one `deferred` of memory. One place is enough to have a W pending
in every exchange; more places fill exchanges that are longer than a W.
"""

from __future__ import annotations

from itertools import accumulate

from zbpp.planning.problem import Plan, Problem
from zbpp.schedule.dataflow_arrays import op_of
from zbpp.schedule.timetable import Op

_MOST_PLACES = 3


def postponed_plans(problem: Problem, plan: Plan) -> list[Plan]:
    """A plan without BW, with W's one place later, two, and three: each rank as far as memory allows."""
    return [
        [_within_memory(problem, rank, row, places) for rank, row in enumerate(plan)]
        for places in range(1, _MOST_PLACES + 1)
    ]


def _within_memory(problem: Problem, rank: int, row: list[int], places: int) -> list[int]:
    """The row with W's as many places later, or fewer."""
    for fewer in range(places, 0, -1):
        later = _later(problem, row, fewer)
        levels = accumulate(problem.memory[a // problem.num_microbatches] for a in later)
        if max(levels) <= problem.ceilings[rank]:
            return later
    return row


def _later(problem: Problem, row: list[int], places: int) -> list[int]:
    """Each W at the place of the W that comes `places` W's later; the last ones at the end."""
    new: list[int] = []
    waiting: list[int] = []
    for a in row:
        if op_of(a // problem.num_microbatches) != Op.W:
            new.append(a)
            continue
        waiting.append(a)
        if len(waiting) > places:
            new.append(waiting.pop(0))
    return new + waiting

"""A plan for few microbatches, made longer by repeating its steady state.

Between warm-up and cool-down a good plan repeats the same actions over and over. So a plan found for
few microbatches, where moves are cheap, is good for any number of them. Each rank's row is cut
near one moment, at a place where its next actions are exactly one F, one B and one W of each of its
stages (or two of each: a period of two microbatches; a BW counts as B and W). These actions are
repeated. As many microbatches are in flight after them as before, so the memory needed
stays the same. Only the timing tells which cut is best, so all moments around the middle are tried.
"""

from __future__ import annotations

import math
from collections import Counter

from zbpp.planning.problem import Plan, Problem
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.incremental_timing import IncrementalTiming
from zbpp.schedule.dataflow_arrays import op_of, stage_of
from zbpp.schedule.timetable import Op, PlanError

_PERIODS = (1, 2)
_PARTS = ((Op.F,), (Op.B,), (Op.W,), (Op.B, Op.W))  # of each op


def repeat_steady_state(
    small: Problem, plan: Plan, big: Problem, deadline: Deadline
) -> IncrementalTiming | None:
    """The best plan for `big` that repeats part of a plan for `small`; None if no cut is steady."""
    timing = IncrementalTiming(small, plan)
    more = big.num_microbatches - small.num_microbatches
    best: IncrementalTiming | None = None
    for period in _PERIODS:
        rows = [_SteadyRow(timing, rank, period) for rank in range(small.num_ranks)]
        if more % period or not all(row.places for row in rows):
            continue
        for places in sorted({tuple(row.nearest(moment) for row in rows) for moment in _moments(timing)}):
            kinds = [row.repeated(at, more // period) for row, at in zip(rows, places, strict=True)]
            longer = _timed(big, kinds)
            if longer and longer.fits() and longer.value < (best.value if best else math.inf):
                best = longer
            if deadline.over:
                return best
    return best


def _moments(timing: IncrementalTiming) -> list[float]:
    """The times at which an action starts, for as long as one microbatch takes in the middle of rank 0."""
    row = timing.rows[0]
    half = len(row) // (2 * timing.problem.num_microbatches)
    middle = len(row) // 2
    first, last = (timing.from_start.length[row[at]] for at in (middle - half, middle + half))
    starts = {timing.start(a) for a in timing.order}
    return sorted(time for time in starts if first <= time < last)


class _SteadyRow:
    """One row as kinds, and where in it a stretch is steady: each F, B, W of each stage `period` times."""

    def __init__(self, timing: IncrementalTiming, rank: int, period: int) -> None:
        row = timing.rows[rank]
        self.kinds = [a // timing.problem.num_microbatches for a in row]
        self.starts = [timing.start(a) for a in row]
        self.period = period
        self.num_parts = 3 * period * len(timing.problem.stages_of[rank])
        self.length = {at: length for at in range(len(row)) if (length := self._steady_length(at))}
        self.places = list(self.length)

    def _steady_length(self, at: int) -> int:
        """How many actions from here on are steady; 0 if none are."""
        counts: Counter[tuple[int, Op]] = Counter()
        for stop in range(at, min(at + self.num_parts, len(self.kinds))):
            kind = self.kinds[stop]
            counts.update((stage_of(kind), part) for part in _PARTS[op_of(kind)])
            if counts.total() == self.num_parts:
                return stop + 1 - at if max(counts.values()) == self.period else 0
        return 0

    def nearest(self, time: float) -> int:
        return min(self.places, key=lambda at: abs(self.starts[at] - time))

    def repeated(self, at: int, times: int) -> list[int]:
        stop = at + self.length[at]
        return self.kinds[:stop] + self.kinds[at:stop] * times + self.kinds[stop:]


def _timed(problem: Problem, kinds: list[list[int]]) -> IncrementalTiming | None:
    try:
        return IncrementalTiming(problem, problem.numbered(kinds))
    except PlanError:
        return None  # what one rank repeats may wait for an action that another rank does not repeat

"""A plan for few microbatches, stretched to many by repeating its steady part.

Between warm-up and cool-down a good plan does much the same thing over and over, so what is found
for a few microbatches, where moves are cheap, holds for any number. Near one time each rank is cut
where its next actions hold every op of every stage once (or twice: a period of two microbatches),
and these are inserted again and again: what was in flight before is in flight after, so memory is as
it was. Which cut is best only the timing says, so all around the middle are tried.
"""

from __future__ import annotations

import math
from collections import Counter

from zbpp.planning.problem import Plan, Problem
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.incremental_timing import Board
from zbpp.schedule.timetable import Op, PlanError

_PERIODS = (1, 2)
_PARTS = ((Op.F,), (Op.B,), (Op.W,), (Op.B, Op.W))  # of each op


def stretched(small: Problem, plan: Plan, big: Problem, deadline: Deadline) -> Board | None:
    """The best board for `big` that repeats part of a plan for `small`; None if no cut is steady."""
    board = Board(small, plan)
    more = big.num_microbatches - small.num_microbatches
    best: Board | None = None
    for period in _PERIODS:
        ranks = [_Rank(board, rank, period) for rank in range(small.num_ranks)]
        if more % period or not all(rank.places for rank in ranks):
            continue
        for cuts in sorted({tuple(rank.nearest(time) for rank in ranks) for time in _times(board)}):
            words = [rank.repeated(at, more // period) for rank, at in zip(ranks, cuts, strict=True)]
            longer = _board(big, words)
            if longer and longer.fits() and longer.value < (best.value if best else math.inf):
                best = longer
            if deadline.over:
                return best
    return best


def _times(board: Board) -> list[float]:
    """When something starts, for as long as one microbatch takes in the middle of rank 0."""
    row = board.rows[0]
    half = len(row) // (2 * board.problem.num_microbatches)
    middle = len(row) // 2
    first, last = (board.end[row[at]] for at in (middle - half, middle + half))
    starts = {board.end[a] - board.duration[a] for a in board.order}
    return sorted(time for time in starts if first <= time < last)


class _Rank:
    """One row as kinds, and where in it a stretch is steady: each F, B, W of each stage `period` times."""

    def __init__(self, board: Board, rank: int, period: int) -> None:
        row = board.rows[rank]
        self.word = [a // board.problem.num_microbatches for a in row]
        self.starts = [board.end[a] - board.duration[a] for a in row]
        self.period = period
        self.due = 3 * period * len(board.problem.stages_of[rank])
        self.length = {at: length for at in range(len(row)) if (length := self._steady_length(at))}
        self.places = list(self.length)

    def _steady_length(self, at: int) -> int:
        """How many actions from here on are steady; 0 if none are."""
        counts: Counter[tuple[int, Op]] = Counter()
        for stop in range(at, min(at + self.due, len(self.word))):
            kind = self.word[stop]
            counts.update((kind >> 2, part) for part in _PARTS[kind & 3])
            if counts.total() == self.due:
                return stop + 1 - at if max(counts.values()) == self.period else 0
        return 0

    def nearest(self, time: float) -> int:
        return min(self.places, key=lambda at: abs(self.starts[at] - time))

    def repeated(self, at: int, times: int) -> list[int]:
        stop = at + self.length[at]
        return self.word[:stop] + self.word[at:stop] * times + self.word[stop:]


def _board(problem: Problem, words: list[list[int]]) -> Board | None:
    try:
        return Board(problem, problem.numbered(words))
    except PlanError:
        return None  # what one rank repeats may wait for what another doesn't

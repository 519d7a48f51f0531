"""B and W of a microbatch joined to one BW, or split again, on a board.

Of a B and its W side by side it is known what a BW does instead: it sends its gradient later, by
what it takes longer than B, and leaves its rank sooner, by what it takes less than both. Neither
changes what comes after, so `tail` tells how long the plan will be, without trying.
"""

from __future__ import annotations

import random

from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.incremental_timing import Board
from zbpp.schedule.timetable import Op

B, W, BW = map(int, (Op.B, Op.W, Op.BW))


def join(board: Board, deadline: Deadline) -> None:
    """Every B and W that can be one, where that pays and the plan gets no longer."""
    for f in foldable(board):
        if board.backward[f] != board.weight[f]:
            limit = board.value + board.problem.tolerance
            _join(board, f, board.weight[f], limit) or _join(board, f, board.backward[f], limit)
        if deadline.over:
            return


def foldable(board: Board) -> list[int]:
    """The F's of those stages where a BW can pay, in order of time."""
    problem, kinds = board.problem, 4 * board.problem.num_microbatches
    if not any(problem.whole_pays):
        return []
    is_first = [a for a in board.order if a % kinds < problem.num_microbatches]
    return [f for f in is_first if problem.whole_pays[f // kinds]]


def toggle(board: Board, f: int, rng: random.Random, limit: float) -> bool:
    """Split or join the backward of F `f`; False, and all as before, if the plan gets too long."""
    if board.backward[f] == board.weight[f]:
        return _split(board, f, limit)
    return _join(board, f, rng.choice((board.backward[f], board.weight[f])), limit)


def _split(board: Board, f: int, limit: float) -> bool:
    number, rank, bw = board.problem.num_microbatches, board.owner[f], board.backward[f]
    b, w = f + B * number, f + W * number
    level = board.levels[rank][board.index[bw] - 1] + board.memory[b]
    start = board.end[bw] - board.duration[bw]
    rest = _after(board, board.after[bw])
    if level > board.problem.ceilings[rank] or start + board.duration[b] + board.duration[w] + rest > limit:
        return False
    board.replace(f, [b, w])
    return True


def _join(board: Board, f: int, mover: int, limit: float) -> bool:
    """B and W to one; the mover goes to where the other stands."""
    b, w, bw = board.backward[f], board.weight[f], f + BW * board.problem.num_microbatches
    was, to = board.index[mover], board.index[b] + 1 if mover == w else board.index[w] - 1
    low, high = board.room(mover)
    if not low <= to <= high:
        return False
    gain = board.duration[b] + board.duration[w] - board.duration[bw]
    if was != to and not board.move(mover, to, limit + max(gain, 0.0)):
        return False
    start = board.end[b] - board.duration[b]
    rest = max(_after(board, board.after[w]), board.away[b] + _after(board, board.target[b]))
    if start + board.duration[bw] + rest > limit:
        if was != to:
            board.move(mover, was, float("inf"))
        return False
    board.replace(f, [bw])
    return True


def _after(board: Board, a: int) -> float:
    """From the start of an action to the end of the plan."""
    return board.duration[a] + board.tail[a]

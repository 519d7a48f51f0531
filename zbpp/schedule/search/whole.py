"""B and W of a microbatch joined to one BW, or split again, on a board."""

from __future__ import annotations

import random

from zbpp.schedule.search.board import Board
from zbpp.schedule.search.deadline import Deadline
from zbpp.schedule.timetable import Op, PlanError


def join(board: Board, rng: random.Random, deadline: Deadline) -> None:
    """Every B and W that can be one, where that pays and the plan gets no longer."""
    for f in foldable(board):
        if board.backward[f] != board.weight[f]:
            toggle(board, f, rng, board.value + board.problem.tolerance)
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
    """Split or join the backward of F `f`; False, and all as before, if the plan gets too long.

    A BW may stand where its B or where its W stood, as long as the W's before its own are done and
    the B's after its own are not.
    """
    number = board.problem.num_microbatches
    b, w, row = board.backward[f], board.weight[f], board.rows[board.owner[f]]
    if b == w:
        at = board.index[b]
        new = [*row[:at], f + Op.B * number, f + Op.W * number, *row[at + 1 :]]
    else:
        new = _joined(board, f, rng)
    if not new:
        return False
    was, board.rows[board.owner[f]] = row, new
    try:
        board.link()
        if board.fits() and board.value <= limit:
            return True
    except PlanError:
        pass  # the BW, later than the B was, waits for itself by way of other ranks
    board.rows[board.owner[f]] = was
    board.link()
    return False


def _joined(board: Board, f: int, rng: random.Random) -> list[int]:
    """The row of `f` with its B and W as one; empty if there is no place for it."""
    number, index = board.problem.num_microbatches, board.index
    microbatch, b, w = f % number, board.backward[f], board.weight[f]
    row = board.rows[board.owner[f]]
    places = []
    if microbatch == 0 or index[board.weight[f - 1]] < index[b]:
        places.append(b)
    if microbatch == number - 1 or index[board.backward[f + 1]] > index[w]:
        places.append(w)
    if not places:
        return []
    place = rng.choice(places)
    whole = f + Op.BW * number
    return [whole if a == place else a for a in row if a == place or a not in (b, w)]

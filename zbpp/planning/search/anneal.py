"""Random moves along the critical path, the longer plan accepted now and then."""

from __future__ import annotations

import random

from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.fuse_backward import foldable, toggle
from zbpp.planning.search.incremental_timing import Board

_REACH = 24  # places; further moves are hardly ever kept
_CRITICAL = 0.9  # of the moves start on a longest path: no other can shorten it
_TOGGLES = 0.05  # of the moves split a BW or join a B and its W, where that can pay,
_TOGGLED = 20  # but fewer on large boards: each costs a pass over the plan


def anneal(
    board: Board, rng: random.Random, moves: int, warmth: float, deadline: Deadline, goal: float
) -> None:
    """Try so many moves; the board is left at the best plan met.

    The limit of a move is drawn before it is timed, so that the timing can stop early: `warmth` (ms,
    falling to 0 over the moves) times an exponential variable above the present objective. Moves
    that change nothing are kept too: from plans of equal length, different ones can be shortened.
    Stops at `goal`.
    """
    tolerance = board.problem.tolerance
    best, best_rows = board.value, [list(row) for row in board.rows]
    folds = foldable(board)
    toggles = min(_TOGGLES, _TOGGLED / len(board.order)) if folds else 0.0
    kept = 0
    for step in range(moves):
        if best <= goal or deadline.over:
            break
        slack = warmth * (1 - step / moves) * rng.expovariate(1.0) + tolerance
        if toggles and rng.random() < toggles:
            if not toggle(board, rng.choice(folds), rng, board.value + slack):
                continue
        elif not _move(board, rng, board.value + slack):
            continue
        kept += 1
        if kept % 20 == 0:
            board.refresh()
        if board.value < best - tolerance:
            best, best_rows = board.value, [list(row) for row in board.rows]
    if board.value > best + tolerance:
        board.rows = best_rows
        board.link()


def _move(board: Board, rng: random.Random, limit: float) -> bool:
    order, everywhere = board.order, rng.random() >= _CRITICAL
    a = rng.choice(order)
    while not (everywhere or board.is_critical(a)):
        a = rng.choice(order)
    at = board.index[a]
    low, high = board.room(a)
    low, high = max(low, at - _REACH), min(high, at + _REACH)
    if low == high:
        return False
    to = rng.randrange(low, high)
    return board.move(a, to + (to >= at), limit)

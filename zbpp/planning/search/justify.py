"""Pushing actions into the gaps of a plan, all to the left and then all to the right.

Known from project scheduling as forward-backward improvement. Timed as early as possible, a plan
has gaps where ranks wait for messages; an F or W from further on that fits into one may go there.
Timed as late as possible it has other gaps, and the same in mirror image. Neither makes the plan
longer, and a few rounds of both close far more than single moves find: what an early F at one rank
is good for shows only when all ranks have moved theirs.
"""

from __future__ import annotations

from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.incremental_timing import Board


def justify(board: Board, deadline: Deadline, most_rounds: int = 6) -> None:
    """Left and right in turn while the objective falls, and once more."""
    for _ in range(most_rounds):
        before = board.value
        push_left(board, deadline)
        push_right(board, deadline)
        if board.value >= before - board.problem.tolerance or deadline.over:
            return


def push_left(board: Board, deadline: Deadline) -> None:
    """Each action, in order of time, to the first gap that can hold it."""
    end, duration, tolerance = board.end, board.duration, board.problem.tolerance
    for a in list(board.order):
        ready, time = end[board.source[a]] + board.lag[a], duration[a]
        if ready + time > end[a] - tolerance:
            continue  # it starts when its message arrives
        row, at = board.rows[board.owner[a]], board.index[a]
        low, first = board.room(a)[0], at
        while first > low and end[row[first - 1]] - duration[row[first - 1]] >= ready + time - tolerance:
            first -= 1
        for to in range(first, at):
            opens = max(end[board.before[row[to]]], ready)
            closes = end[row[to]] - duration[row[to]]
            if opens + time <= closes + tolerance and board.move(a, to, board.value + tolerance):
                break
        if deadline.over:
            break
    board.refresh()


def push_right(board: Board, deadline: Deadline) -> None:
    """Each action, from the end back, to the last gap that can hold it if all run as late as they may."""
    tail, duration, tolerance = board.tail, board.duration, board.problem.tolerance
    for a in sorted(board.order, key=tail.__getitem__):
        target, time = board.target[a], duration[a]
        follows = board.away[a] + duration[target] + tail[target]
        if follows + time > tail[a] + time - tolerance:
            continue
        row, at = board.rows[board.owner[a]], board.index[a]
        high, last = board.room(a)[1], at
        while last < high and tail[row[last + 1]] >= follows + time - tolerance:
            last += 1
        for to in range(last, at, -1):
            after = board.after[row[to]]
            closes = max(tail[after] + duration[after], follows)
            if closes + time <= tail[row[to]] + tolerance and board.move(a, to, board.value + tolerance):
                break
        if deadline.over:
            break
    board.refresh()

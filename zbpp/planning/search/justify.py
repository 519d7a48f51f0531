"""Justification: push actions into the gaps of a plan, all to the left and then all to the right.

Known from project scheduling as forward-backward improvement. Timed as early as possible, a plan
has gaps where ranks wait for messages; an F or W from further on that fits into a gap may go there.
Timed as late as possible the plan has other gaps, and the same is done in mirror image. Neither makes
the plan longer. A few rounds of both close far more gaps than single moves do: an early F on one rank
pays only when the other ranks have moved theirs, too.
"""

from __future__ import annotations

from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.incremental_timing import IncrementalTiming
from zbpp.planning.search.plan_graph import Paths

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

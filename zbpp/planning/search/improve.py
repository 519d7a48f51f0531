"""What improves a timed plan and never makes it longer: random moves, justification, fused backwards.

**Random moves.** An action on the critical path moves a few places along its rank. Moves that change nothing
are kept, too: of two plans of equal length, one may be possible to shorten and the other not. (Accepting a
longer plan now and then, as in annealing, moved nothing.)

**Justification**, known from project scheduling as forward-backward improvement. Timed as early as possible,
a plan has gaps where ranks wait for messages; an F or W from further on that fits into a gap may go there.
Timed as late as possible the plan has other gaps, and the same is done in mirror image. A few rounds of both
close far more gaps than single moves do: an early F on one rank pays only when the other ranks have moved
theirs, too.

**Fused backwards.** Where B and W of a microbatch stand side by side, a BW in their place changes two times:
its gradient is sent later, by what BW takes longer than B, and its rank is free sooner, by what BW takes less
than B and W. All that follows stays as it is, so the paths to the end tell how long the plan will be before
it changes.
"""

from __future__ import annotations

import math
import random

from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.incremental_timing import IncrementalTiming
from zbpp.planning.search.plan_graph import Paths
from zbpp.schedule.timetable import Op

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
    """Try `num_moves` moves, and stop at `goal`."""
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


B, W, BW = map(int, (Op.B, Op.W, Op.BW))


def fuse_all(timing: IncrementalTiming, deadline: Deadline) -> None:
    """Fuse each B and W for which that can pay, if the plan gets no longer."""
    for f in fusible(timing):
        b, w = timing.backward[f], timing.weight[f]
        if b != w:
            max_value = timing.value + timing.problem.tolerance
            _fuse(timing, f, w, max_value) or _fuse(timing, f, b, max_value)
        if deadline.over:
            return


def fusible(timing: IncrementalTiming) -> list[int]:
    """The F's on stages where a BW can pay, in order of time."""
    problem, per_stage = timing.problem, 4 * timing.problem.num_microbatches
    if not any(problem.whole_pays):
        return []
    forwards = [a for a in timing.order if a % per_stage < problem.num_microbatches]
    return [f for f in forwards if problem.whole_pays[f // per_stage]]


def fuse_or_split(timing: IncrementalTiming, f: int, rng: random.Random, max_value: float) -> bool:
    """Change the backward of F `f`; False, and nothing has changed, if the plan gets too long."""
    if timing.backward[f] == timing.weight[f]:
        return _split(timing, f, max_value)
    return _fuse(timing, f, rng.choice((timing.backward[f], timing.weight[f])), max_value)


def _split(timing: IncrementalTiming, f: int, max_value: float) -> bool:
    number, rank, bw = timing.problem.num_microbatches, timing.rank_of_action[f], timing.backward[f]
    b, w = f + B * number, f + W * number
    level = timing.levels[rank][timing.index[bw] - 1] + timing.memory[b]
    end = timing.start(bw) + timing.duration[b] + timing.duration[w]
    following = timing.to_end.neighbour[bw]
    if level > timing.problem.ceilings[rank] or end + timing.to_end.length[following] > max_value:
        return False
    timing.replace_backward(f, [b, w])
    return True


def _fuse(timing: IncrementalTiming, f: int, mover: int, max_value: float) -> bool:
    """Replace B and W by a BW. `mover` is one of the two (an id): it is moved beside the other first."""
    duration, to_end = timing.duration, timing.to_end
    b, w, bw = timing.backward[f], timing.weight[f], f + BW * timing.problem.num_microbatches
    at, to = timing.index[mover], timing.index[b] + 1 if mover == w else timing.index[w] - 1
    low, high = timing.feasible_range(mover)
    if not low <= to <= high:
        return False
    gain = duration[b] + duration[w] - duration[bw]
    if at != to and not timing.move(mover, to, max_value + max(gain, 0.0)):
        return False
    after_rank = to_end.length[to_end.neighbour[w]]
    after_message = to_end.latency[b] + to_end.length[to_end.partner[b]]
    if timing.start(b) + duration[bw] + max(after_rank, after_message) > max_value:
        if at != to:
            timing.move(mover, at, math.inf)
        return False
    timing.replace_backward(f, [bw])
    return True

"""Fuse B and W of a microbatch into one BW, or split a BW, in a timed plan.

Where B and W stand side by side, a BW in their place changes two times: its gradient is sent later,
by what BW takes longer than B, and its rank is free sooner, by what BW takes less than B and W. All
that follows stays as it is, so the paths to the end tell how long the plan will be before it changes.
"""

from __future__ import annotations

import math
import random

from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.incremental_timing import IncrementalTiming
from zbpp.schedule.timetable import Op

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

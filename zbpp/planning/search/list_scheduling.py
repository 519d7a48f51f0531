"""List scheduling that aims at a target: one stage per rank, each rank allowed to wait.

A greedy planner never waits while it has a W to run, and so delays an F or a B that is about to
arrive, and with it every rank after. But a rank that is to finish at a target X has time to spare:
X, less its work, less the wait that no plan avoids at its end. Here it may spend that budget where
waiting pays, and only when it is used up is it made to run whatever it has.

What a rank prefers is set by `Knobs`; none is best everywhere, so many settings are drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush

from zbpp.planning.problem import Problem
from zbpp.schedule.timetable import Op

F, B, W, BW = map(int, Op)


@dataclass(frozen=True)
class Knobs:
    """What one rank does when there is a choice.

    forward: with an F and a B both there, take the F, as long as fewer than `cap` are in flight.
    strict: at the cap, take no F even if only an F is there.
    frees: with an F there and no room for it, run a W at once, even if a B is there or about to be.
    patience: with only an F there, wait for a B that arrives within this many times F.
    budget: how much of its spare time the rank may wait.
    whole: with no W left over, run a BW instead of a B.
    """

    forward: bool
    cap: int
    strict: bool
    frees: bool
    patience: float
    budget: float
    whole: bool


def aimed_plan(
    problem: Problem, spare: list[float], early: list[Knobs], late: list[Knobs], turn: list[int]
) -> tuple[float, list[list[int]]]:
    """One run: its objective, and per rank the kinds in order.

    spare: per rank, how long it may wait if it is to meet the target.
    early, late: per rank, its knobs for the first `turn` F's, and from then on.
    """
    last, number = problem.num_ranks - 1, problem.num_microbatches
    limits = problem.ceilings
    time_f, time_b, time_w, time_bw = (problem.stage_costs.duration[op] for op in Op)
    held, freed, kept, cleared = (problem.stage_costs.memory[op] for op in Op)
    latency, backward_latency = problem.latency, problem.backward_latency
    ranks = range(last + 1)
    knobs, later = (
        [
            (k.forward, k.cap, k.strict, k.frees, k.patience * f, k.budget * time, k.whole)
            for k, f, time in zip(each, time_f, spare, strict=True)
        ]
        for each in (early, late)
    )
    inputs: list[list[float]] = [[] for _ in ranks]
    gradients: list[list[float]] = [[] for _ in ranks]
    inputs[0] = [0.0] * number
    done_f, done_b, done_w = ([0 for _ in ranks] for _ in range(3))
    level, free, waited = ([0.0 for _ in ranks] for _ in range(3))
    asleep = [False for _ in ranks]
    words: list[list[int]] = [[] for _ in ranks]
    events = [(0.0, rank) for rank in ranks]
    while events:
        now, rank = heappop(events)
        asleep[rank] = False
        f, b, w = done_f[rank], done_b[rank], done_w[rank]
        arrived = inputs[rank]
        next_f = arrived[f] if f < len(arrived) else math.inf
        arrived = gradients[rank]
        next_b = arrived[b] if b < len(arrived) else math.inf
        if f == turn[rank]:
            knobs[rank] = later[rank]
        forward, cap, strict, frees, patience, budget, whole = knobs[rank]
        room = level[rank] + held[rank] <= limits[rank]
        below = f - b < cap
        op = -1
        if next_b <= now:
            if next_f <= now and forward and below and (room or (frees and w < b)):
                op = F if room else W
            else:
                op = BW if whole and w == b else B
                if op == B and level[rank] + freed[rank] > limits[rank]:
                    op = W if w < b else BW
        else:
            allowed = room and (below or not strict)
            if next_f <= now and allowed:
                wait = next_b - now
                if wait >= patience or waited[rank] + next_b - free[rank] > budget:
                    op = F
                else:
                    wake = next_b
            else:
                wake = next_f if allowed and next_f < next_b else next_b
                if w < b and (
                    wake - now >= time_w[rank]
                    or waited[rank] + wake - free[rank] > budget
                    or (frees and not room and next_f <= now)
                ):
                    op = W
            if op == -1:
                if wake < math.inf:
                    heappush(events, (wake, rank))
                else:
                    asleep[rank] = True
                continue
        if f:
            waited[rank] += now - free[rank]
        words[rank].append(rank * 4 + op)
        if op == F:
            end = now + time_f[rank]
            level[rank] += held[rank]
            done_f[rank] = f + 1
            if rank == last:
                gradients[rank].append(end)
            else:
                inputs[rank + 1].append(end + latency[rank])
                if asleep[rank + 1]:
                    asleep[rank + 1] = False
                    heappush(events, (now, rank + 1))
        elif op == W:
            end = now + time_w[rank]
            level[rank] += kept[rank]
            done_w[rank] = w + 1
        else:
            if op == B:
                end = now + time_b[rank]
                level[rank] += freed[rank]
            else:
                end = now + time_bw[rank]
                level[rank] += cleared[rank]
                done_w[rank] = w + 1
            done_b[rank] = b + 1
            if rank:
                gradients[rank - 1].append(end + backward_latency[rank - 1])
                if asleep[rank - 1]:
                    asleep[rank - 1] = False
                    heappush(events, (now, rank - 1))
        free[rank] = end
        heappush(events, (end, rank))
    complete = min(done_w) == number
    value = max(end - offset for end, offset in zip(free, problem.offsets, strict=True))
    return value if complete else math.inf, words

"""Few microbatches in memory, each held for a whole round trip: what that makes of all m of them.

On stage s a microbatch is held from the start of its F (while F runs, the level that its end will
have is within the limit already) to the end of its B: for `held` = the chain from F(s) up and
back to B(s), at least. idle.py counts the first and the last of these round trips, this file all.
It binds where memory is far below that of 1F1B, or messages are slow.

**Relay** (a rank with one stage). At most K = floor(limit / saved) are held, so F(j) waits for the
end of B(j-K); and, since the W's that wait need memory too, for some i >= 0 for both

    B(j-K+i), after which K-1-i others are held, and
    W(j-K+i-x), x = as many W's as may wait then: (K-i) saved + x deferred <= limit.

Each i is a way to make room; the least over i bounds the start of F(j). And of course
F(j) comes after j F's and the B's and W's named. From F(j) follows the end of B(j), from
that the end of W(j); so the bound runs up to the last B by induction. (Of the ways from i = 3 on
only B(j-K+3) is asked: less than any of them does.)

**Little's law** (any rank). At most K stage-microbatches are held, K = floor(limit / least saved), so

    m * (sum of held over its stages) <= integral of the number held <= K T - ramps

for the time T from its first F to its last B: the j-th F starts (j - 1) f after the first or later,
and at the end the number falls by one per b at most, so K (K - 1) / 2 * (f + b) of K T is unused.
Where stages hold different amounts, weighing by them may say more:

    m * (sum of saved * held over its stages) <= integral of the level <= limit * T
"""

from __future__ import annotations

import math

from zbpp.planning.bounds.relaxed import ROUNDING, Relaxed, StageTerms

_WAYS = 4  # i = 0..3
_MOST_STEPS = 20_000  # relay takes a few microseconds per microbatch and rank


def round_trips(problem: Relaxed, rank: int) -> float:
    """The least time (ms) from the start of a rank's first F to the end of its last B."""
    stages = [problem.stages[stage] for stage in problem.owned[rank]]
    least, limit = min(stage.saved for stage in stages), problem.limits[rank] * (1 + ROUNDING)
    if limit >= least * len(stages) * problem.num_microbatches:
        return 0.0
    most = math.floor(limit / least)
    held = sum(_held(problem, stage) for stage in problem.owned[rank])
    if len(stages) == 1 and problem.num_ranks * problem.num_microbatches <= _MOST_STEPS:
        return max(_little(problem, stages, most, held), _relay(problem, stages[0], limit, held))
    return max(_little(problem, stages, most, held), _area(problem, rank))


def _area(problem: Relaxed, rank: int) -> float:
    area = sum(problem.stages[stage].saved * _held(problem, stage) for stage in problem.owned[rank])
    return problem.num_microbatches * area / (problem.limits[rank] * (1 + ROUNDING))


def _held(problem: Relaxed, stage: int) -> float:
    """From the start of a stage's F to the end of its B of the same microbatch, the least."""
    return problem.turn - problem.down[stage] + problem.up[-1] - problem.up[stage]


def _little(problem: Relaxed, stages: list[StageTerms], most: int, held: float) -> float:
    ramps = most * (most - 1) / 2 * (min(stage.f for stage in stages) + min(stage.b for stage in stages))
    return (problem.num_microbatches * held + ramps) / most


def _relay(problem: Relaxed, stage: StageTerms, limit: float, held: float) -> float:
    ways = _ways(stage, limit)
    b_ends: list[float] = []
    w_ends: list[float] = []
    start = -stage.f
    for j in range(problem.num_microbatches):
        room = (_room(stage, j, j - most, waiting, b_ends, w_ends) for most, waiting in ways)
        start = max(start + stage.f, min(room))
        b_ends.append(max(start + held, b_ends[-1] + stage.b if j else 0.0))
        w_ends.append(max(b_ends[-1], w_ends[-1] if j else 0.0) + stage.w)
    return b_ends[-1]


def _ways(stage: StageTerms, limit: float) -> list[tuple[int, int | None]]:
    """(how many may be held, F's included; how many W's may wait then, None: any) per way."""
    most = math.floor(limit / stage.saved)
    ways: list[tuple[int, int | None]] = []
    for i in range(min(_WAYS, most)):
        rest = limit - (most - i) * stage.saved
        ways.append((most - i, math.floor(rest / stage.deferred) if stage.deferred > 0 else None))
    return ways if most <= _WAYS else [*ways[:-1], (ways[-1][0], None)]


def _room(
    stage: StageTerms, j: int, b: int, waiting: int | None, b_ends: list[float], w_ends: list[float]
) -> float:
    """When F(j) can start, in the way that asks for B(b) and W(b - waiting)."""
    w = -1 if waiting is None else b - waiting
    moment = j * stage.f + max(0, b + 1) * stage.b + max(0, w + 1) * stage.w
    if b >= 0:
        moment = max(moment, b_ends[b])
    if w >= 0:
        moment = max(moment, w_ends[w])
    return moment

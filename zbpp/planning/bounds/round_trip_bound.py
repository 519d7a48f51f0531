"""Few microbatches in memory, each held for a whole round trip: what that means for all m of them.

On stage s a microbatch is held from the start of its F to the end of its B: at least for the round trip from
F(s) up to the last stage and back to B(s). (Memory counts from the start of F: F may start only if the
level after it is within the limit.) `idle_bound` counts the first and the last of these round trips, this
file counts all. It binds where memory is far below that of 1F1B, or messages are slow.

**Relay** (a rank with one stage). At most K = floor(limit / saved) are held, so F(j) waits for the
end of B(j-K). The W's that wait need memory, too. So F(j) waits, for some i >= 0, for both

    B(j-K+i), after which K-1-i others are held, and
    W(j-K+i-x), where x is how many W's may wait then: (K-i) saved + x deferred <= limit.

Each i is a way to make room; the least over i bounds the start of F(j). F(j) also comes after j F's and after
the B's and W's named. From F(j) follows the end of B(j), and from that the end of W(j), so the bound runs
up to the last B by induction. (The ways with i >= 3 are replaced by one condition that is weaker than each
of them: B(j-K+3) has ended.)

**Little's law** (any rank). At most K stage-microbatches are held, K = floor(limit / least saved), so

    m * (sum of round trips over its stages) <= integral of the number held <= K T - ramps

for the time T from its first F to its last B. The j-th F starts (j - 1) f after the first or later, and at
the end the number falls by one per b at most, so K (K - 1) / 2 * (f + b) of K T is unused.
Where stages hold different amounts, weighing by them may say more:

    m * (sum of saved * round trip over its stages) <= integral of the level <= limit * T
"""

from __future__ import annotations

import math

from zbpp.planning.bounds.relaxation import Relaxation, StageTerms

_WAYS = 4  # i = 0..3
_MOST_STEPS = 20_000  # relay takes a few microseconds per microbatch and rank


def round_trips(relaxation: Relaxation, rank: int) -> float:
    """The least time (ms) from the start of a rank's first F to the end of its last B."""
    problem, stages = relaxation.problem, relaxation.stages_on(rank)
    least, limit = min(stage.saved for stage in stages), problem.ceilings[rank]
    if limit >= least * len(stages) * problem.num_units:
        return 0.0
    number, own = problem.num_units, problem.stages_of[rank]
    trips = [relaxation.mean_round_trip(stage) for stage in own]
    by_count = _little(stages, number, math.floor(limit / least), sum(trips))
    if len(stages) == 1 and problem.num_ranks * number <= _MOST_STEPS:
        return max(by_count, _relay(stages[0], number, limit, relaxation.round_trip(own[0])))
    return max(by_count, _by_memory(stages, number, limit, trips))


def _by_memory(stages: list[StageTerms], number: int, limit: float, trips: list[float]) -> float:
    return number * sum(stage.saved * trip for stage, trip in zip(stages, trips, strict=True)) / limit


def _little(stages: list[StageTerms], number: int, most: int, trips: float) -> float:
    """Little's law. most: how many are held at most; trips: the sum of round trips over the stages."""
    ramps = most * (most - 1) / 2 * (min(stage.f for stage in stages) + min(stage.b for stage in stages))
    return (number * trips + ramps) / most


def _relay(stage: StageTerms, number: int, limit: float, trip: float) -> float:
    """The end of the last B, F by F. trip: the stage's round trip."""
    ways = _ways(stage, limit)
    b_ends: list[float] = []
    w_ends: list[float] = []
    start = -stage.f
    for j in range(number):
        ready = (_ready(stage, j, j - most, waiting, b_ends, w_ends) for most, waiting in ways)
        start = max(start + stage.f, min(ready))
        b_ends.append(max(start + trip, b_ends[-1] + stage.b if j else 0.0))
        w_ends.append(max(b_ends[-1], w_ends[-1] if j else 0.0) + stage.w)
    return b_ends[-1]


def _ways(stage: StageTerms, limit: float) -> list[tuple[int, int | None]]:
    """The ways to make room, each as (how many may be held, how many W's may wait then).

    The new F counts as held. None: any number of W's may wait.
    """
    most = math.floor(limit / stage.saved)
    ways: list[tuple[int, int | None]] = []
    for i in range(min(_WAYS, most)):
        rest = limit - (most - i) * stage.saved
        ways.append((most - i, math.floor(rest / stage.deferred) if stage.deferred > 0 else None))
    return ways if most <= _WAYS else [*ways[:-1], (ways[-1][0], None)]


def _ready(
    stage: StageTerms, j: int, b: int, waiting: int | None, b_ends: list[float], w_ends: list[float]
) -> float:
    """When F(j) can start, in the way that waits for B(b) and W(b - waiting)."""
    w = -1 if waiting is None else b - waiting
    moment = j * stage.f + max(0, b + 1) * stage.b + max(0, w + 1) * stage.w
    if b >= 0:
        moment = max(moment, b_ends[b])
    if w >= 0:
        moment = max(moment, w_ends[w])
    return moment

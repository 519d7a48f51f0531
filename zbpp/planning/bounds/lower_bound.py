"""`lower_bound` and `certificate`: the doors to all bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zbpp.planning.bounds.first_backward_bound import late_first_b
from zbpp.planning.bounds.idle_bound import Idle
from zbpp.planning.bounds.relaxed import ROUNDING, Relaxed
from zbpp.planning.bounds.round_trip_bound import round_trips
from zbpp.schedule.costs import Costs
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import Op, PlanError, Timetable

MAKESPAN, SPAN = "makespan", "span"
PROVED = 1e-8  # relative; bounds give way by up to ROUNDING


@dataclass(frozen=True)
class Bound:
    """No plan takes less than `value` ms; argument: which of the proofs gives it."""

    value: float
    argument: str


@dataclass(frozen=True)
class Certificate:
    """What a plan takes (ms), what no plan can undercut (ms), and gap = value / bound - 1."""

    value: float
    bound: float
    argument: str
    gap: float
    proved_optimal: bool


def lower_bound(
    objective: str,
    *,
    rank_of: Sequence[int],
    num_microbatches: int,
    costs: Costs = Costs(),
    memory_limit: float | Sequence[float] | None = None,
    splits: bool = True,
) -> Bound:
    """The largest of all lower bounds on a plan's "makespan" or "span" (the largest span of a rank).

    Holds for every timetable with the placement rank_of[stage] that keeps each rank's memory, after
    every action, within memory_limit (in the unit of costs.saved, per rank or one per rank; None:
    no limit); with backwards split, whole or both, or without splits whole ones only.
    Raises PlanError for an unknown objective, and for a limit that can't hold one microbatch.
    """
    if objective not in (MAKESPAN, SPAN):
        raise PlanError(f"objective={objective!r}: write 'makespan' or 'span'")
    problem = Relaxed(rank_of, num_microbatches, costs, memory_limit, splits)
    follows = what_follows(problem, objective)
    idles = [Idle(problem, rank, after) for rank, after in enumerate(follows)]
    bounds = [
        bound for rank in range(problem.num_ranks) for bound in _of_rank(problem, idles[rank], objective)
    ]
    best = max(bounds, key=lambda bound: bound.value)
    late = late_first_b(problem, idles, objective, best.value)
    return Bound(late, "first B's are late") if late > best.value * (1 + 1e-12) else best


def _of_rank(problem: Relaxed, idle: Idle, objective: str) -> list[Bound]:
    """What rank r, whose first F starts `lead` after the clock, proves by itself.

    Its actions take their time, it idles as in idle.py or turns over as in turnover.py, and
    then what follows its last B takes its own.
    """
    rank = idle.rank
    lead = problem.down[problem.first(rank)] if objective == MAKESPAN else 0.0
    turnover = round_trips(problem, rank)
    return [
        Bound(lead + problem.work(rank) + idle.least, f"work and forced idle time of rank {rank}"),
        Bound(lead + turnover + idle.follows, f"round trips through the memory of rank {rank}"),
    ]


def what_follows(problem: Relaxed, objective: str) -> list[float]:
    """Per rank, the time X (ms) that must pass from the end of its last B to the end of the clock.

    Its last B is that of the last microbatch on its lowest stage s. That microbatch's B's follow on
    s-1, ..., 0. Each stage j <= s ends with a W, so for the makespan

        X = max over j <= s of (up[s] - up[j]) + w[j].

    The span of the rank i that owns j counts from i's own first F, which on stage `first(i)` <= j
    comes at least down[s] - down[first(i)] before that of rank r: this lead counts for X, too.
    (If j = s, then X is r's own last W.) So the bound on r's work and idle time plus X
    bounds the span of some rank, whichever j attains the maximum.
    """
    most, follows = -math.inf, [0.0] * problem.num_ranks
    for stage, rank in enumerate(problem.rank_of):
        first = problem.first(rank)
        lead = 0.0 if objective == MAKESPAN else problem.down[first]
        most = max(most, problem.stages[stage].w - problem.up[stage] - lead)
        if stage == first:
            follows[rank] = problem.up[stage] + lead + most
    return follows


def certificate(
    timetable: Timetable,
    costs: Costs = Costs(),
    objective: str = MAKESPAN,
    memory_limit: float | Sequence[float] | None = None,
) -> Certificate:
    """How far a timetable is from the best with its placement under the memory limit.

    proved_optimal: value and bound agree to 1e-8. The bound allows splits even if the
    timetable makes none. Raises PlanError as `simulate` and `lower_bound` do, and for a timetable
    that exceeds the limit or is of F's alone.
    """
    bound = lower_bound(
        objective,
        rank_of=timetable.rank_of,
        num_microbatches=timetable.num_microbatches,
        costs=costs,
        memory_limit=memory_limit,
    )
    timeline = simulate(timetable, costs)
    _check_within(timeline, memory_limit)
    value = timeline.makespan if objective == MAKESPAN else timeline.max_span
    gap = value / bound.value - 1 if bound.value > 0 else (math.inf if value > 0 else 0.0)
    return Certificate(value, bound.value, bound.argument, gap, proved_optimal=gap <= PROVED)


def _check_within(timeline: Timeline, memory_limit: float | Sequence[float] | None) -> None:
    if all((row.ops == Op.F).all() for row in timeline.timetable.rows):
        raise PlanError("the timetable has no backward: bounds are for training steps")
    if memory_limit is None:
        return
    peaks = timeline.peak_memory
    limits = memory_limit if isinstance(memory_limit, Sequence) else [memory_limit] * len(peaks)
    for rank, (peak, allowed) in enumerate(zip(peaks, limits, strict=True)):
        if not peak <= allowed * (1 + ROUNDING):
            raise PlanError(f"the timetable needs {peak:g} on rank {rank}, memory_limit allows {allowed:g}")

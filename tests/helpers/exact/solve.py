"""`solve`: the best timetable of a small problem, with its proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helpers.exact.model import Model
from zbpp.planning.memory_limit import MemoryLimit, check_fits
from zbpp.planning.objective import EQUAL, MAKESPAN
from zbpp.planning.problem import Problem, one_by_one
from zbpp.schedule.costs import Costs
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import Op, PlanError, Timetable

MOST_RANKS = 4
MOST_ACTIONS = 400


@dataclass(frozen=True)
class Exact:
    """A timetable and its time, `value` (ms). None takes less than `bound` (ms); proved: the two agree."""

    timetable: Timetable
    value: float
    bound: float
    proved: bool


def solve(
    rank_of: Sequence[int],
    num_microbatches: int,
    *,
    costs: Costs = Costs(),
    memory_limit: MemoryLimit = None,
    objective: str = MAKESPAN,
    time_limit: float = 10.0,
    seed: int = 0,
    start: Timetable | None = None,
    known_bound: float = 0.0,
) -> Exact:
    """The best timetable for a placement, rank_of[stage], with its proof status.

    start: a timetable to begin with (of this placement, within the limit); the result is never worse.
    known_bound: a lower bound (ms) that the caller vouches for; a plan that attains it ends the search.
    Raises PlanError above 4 ranks or 400 actions, for a limit that can't hold one microbatch, for actions
    that take no time, and for a start that doesn't fit.
    """
    problem = Problem(tuple(rank_of), num_microbatches, costs, memory_limit, objective)
    _check_solvable(problem)
    return _solved(problem, time_limit, seed, start, known_bound)


def _check_solvable(problem: Problem) -> None:
    """Raises PlanError for a problem that is too large for the solver, or has actions of no time."""
    actions = 3 * problem.num_stages * problem.num_microbatches
    if problem.num_ranks > MOST_RANKS or actions > MOST_ACTIONS:
        raise PlanError(
            f"`optimal` is for {MOST_RANKS} ranks and {MOST_ACTIONS} actions at most, this has "
            f"{problem.num_ranks} and {actions}: use `zb_auto`; `certificate` tells how far its plan is "
            "from the bound"
        )
    for op in (Op.F, Op.B, Op.BW):
        if min(problem.stage_costs.duration[op]) <= 0:
            raise PlanError(f"`optimal` needs actions that take time: {op} takes 0 ms on some stage")


def _solved(
    problem: Problem,
    time_limit: float,
    seed: int,
    start: Timetable | None,
    known_bound: float,
) -> Exact:
    first = problem.timetable_of(one_by_one(problem)) if start is None else start
    timeline = _timeline_of_start(problem, first)
    value = problem.value_of(timeline)
    if start is not None and value <= known_bound * (1 + EQUAL):
        return Exact(first, value, min(known_bound, value), proved=True)
    model = Model(problem)
    model.hint(timeline)
    found, bound = model.solve(time_limit, seed, known_bound)
    candidates = [timeline, *(simulate(each, problem.costs) for each in found)]
    best = min(candidates, key=problem.value_of)
    value, bound = problem.value_of(best), max(bound, known_bound)
    return Exact(best.timetable, value, min(bound, value), proved=value <= bound * (1 + EQUAL))


def _timeline_of_start(problem: Problem, start: Timetable) -> Timeline:
    """Raises PlanError for a timetable that is no plan for the problem."""
    if start.rank_of != problem.rank_of or start.num_microbatches != problem.num_microbatches:
        raise PlanError("the timetable to start with has another placement or number of microbatches")
    timeline = simulate(start, problem.costs)
    check_fits("the timetable to start with", timeline.peak_memory, problem.limits, problem.costs.memory_unit)
    return timeline

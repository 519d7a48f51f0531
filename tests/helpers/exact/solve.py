"""`solve`: the best timetable of a small problem, with its proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helpers.exact.model import Model
from zbpp.planning.memory_limit import MemoryLimit
from zbpp.planning.options import EQUAL, MAKESPAN
from zbpp.planning.problem import Problem, one_by_one
from zbpp.schedule.costs import Costs
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Timetable


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
    known_bound: float = 0.0,
) -> Exact:
    """The best timetable for a placement, rank_of[stage], with its proof status.

    known_bound: a lower bound (ms) that the caller vouches for; a plan that attains it ends the search.
    For actions that take time, about 4 ranks and 400 actions at most. Raises PlanError for a limit that can't
    hold one microbatch.
    """
    problem = Problem(tuple(rank_of), num_microbatches, costs, memory_limit, objective)
    timeline = simulate(problem.timetable_of(one_by_one(problem)), costs)
    model = Model(problem)
    model.hint(timeline)
    found, bound = model.solve(time_limit, seed, known_bound)
    candidates = [timeline, *(simulate(each, problem.costs) for each in found)]
    best = min(candidates, key=problem.value_of)
    value, bound = problem.value_of(best), max(bound, known_bound)
    return Exact(best.timetable, value, min(bound, value), proved=value <= bound * (1 + EQUAL))

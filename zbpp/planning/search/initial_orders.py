"""Plans to begin with: the families, the paper's planner, repeated patterns, and one that always fits."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial

from zbpp.families import FAMILIES
from zbpp.planning.placement import place_stages
from zbpp.planning.problem import Plan, Problem, one_by_one
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.insert_weight_grads import weave
from zbpp.planning.search.paper_planner import paper_plan
from zbpp.planning.search.periodic_blocks import blocks, unrolled
from zbpp.schedule.timetable import Op, PlanError, Timetable

Order = Callable[[Problem], list[list[int]]]  # F's and B's per rank, for any number of microbatches

_EAGERNESS = (1.0, 0.5, 0.0)
_STARTS = 12
_SHARE = 0.25  # of the time, at most, for trying patterns


def fitting(problem: Problem) -> Iterator[tuple[float, Plan]]:
    """Whole plans within memory, with their objective; one at least."""
    for plan in [one_by_one(problem), *planned(problem), *families(problem)]:
        apart = split(problem, plan)
        for each in [plan] if apart == plan else [plan, apart]:
            value = problem.timed(each)
            if value < math.inf:
                yield value, each


def starts(problem: Problem, deadline: Deadline) -> list[Plan]:
    """Orders of families and patterns with their W's put in anew: the best dozen, best first."""
    plans: list[Plan] = []
    seen: set[float] = set()
    for small_value, eagerness, make in _tried(problem, deadline):
        if len(plans) == _STARTS or deadline.over:
            break
        if small_value in seen:
            continue
        seen.add(small_value)
        order = make(problem)
        value, plan = weave(problem, order, eagerness) if order else (math.inf, [])
        if value < math.inf:
            plans.append(plan)
    return plans


def _tried(problem: Problem, deadline: Deadline) -> list[tuple[float, float, Order]]:
    """(objective for few microbatches, eagerness, order) of what fits, best first."""
    small = problem.with_microbatches(min(problem.num_microbatches, 3 * problem.num_ranks))
    found: list[tuple[float, float, Order]] = []
    met: list[list[list[int]]] = [[]]  # many patterns come to the same order
    for make in orders(problem):
        order = make(small)
        if order not in met:
            met.append(order)
            values = ((weave(small, order, eagerness)[0], eagerness) for eagerness in _EAGERNESS)
            found += [(value, eagerness, make) for value, eagerness in values if value < math.inf]
        if deadline.over or deadline.fraction > _SHARE:
            break
    return sorted(found, key=lambda each: each[0])


def planned(problem: Problem) -> list[Plan]:
    """The paper's planner, where it applies."""
    if problem.placement != "one":
        return []
    try:
        return [paper_plan(problem)]
    except PlanError:
        return []  # it has no whole backwards, which need less


def families(problem: Problem) -> Iterator[Plan]:
    """What the families of this placement plan, whether it fits the memory or not."""
    for family in _own_families(problem):
        plan = _family_plan(family, problem)
        if plan:
            yield plan


def orders(problem: Problem) -> Iterator[Order]:
    """Of the families of this placement, and of repeated patterns if it is a V."""
    for family in _own_families(problem):
        yield partial(_family_order, family)
    if problem.placement == "v":
        yield from (partial(unrolled, slots) for slots in blocks(problem.num_ranks))


def _own_families(problem: Problem) -> Iterator[Callable[..., Timetable]]:
    """The families with this placement, as one rank or two show it, cheaply."""
    per_rank = problem.num_stages // problem.num_ranks
    num_ranks = min(problem.num_ranks, 2)  # on one rank a V is a loop, too
    own = place_stages(num_ranks, problem.placement, per_rank)
    for family in FAMILIES.values():
        if "stages_per_rank" in inspect.signature(family).parameters:
            family = partial(family, stages_per_rank=per_rank)
        if family(num_ranks, 4).rank_of == own:
            yield family


def _family_plan(family: Callable[..., Timetable], problem: Problem) -> Plan:
    """Empty if the family can't do these counts."""
    try:
        return problem.plan_of(family(problem.num_ranks, problem.num_microbatches))
    except PlanError:
        return []


def _family_order(family: Callable[..., Timetable], problem: Problem) -> list[list[int]]:
    plan = split(problem, _family_plan(family, problem))
    return [[a for a in row if a // problem.num_microbatches & 3 != Op.W] for row in plan]


def split(problem: Problem, plan: Plan) -> Plan:
    """Each BW as B and W, one after the other."""
    number, bw = problem.num_microbatches, int(Op.BW)
    return [
        [part for a in row for part in ((a - 2 * number, a - number) if a // number & 3 == bw else (a,))]
        for row in plan
    ]

"""Plans to begin with: the families, the paper's planner, and one that always fits."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from zbpp.planning.placement import place_stages
from zbpp.planning.problem import Plan, Problem, one_by_one
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.insert_weight_grads import insert_weight_grads
from zbpp.planning.search.paper_planner import paper_plan
from zbpp.schedule.dataflow_arrays import op_of
from zbpp.schedule.families import FAMILIES
from zbpp.schedule.timetable import Op, PlanError, Timetable

# Gives F's and B's in order, per rank; empty if the family can't have so many ranks and microbatches.
MakeOrder = Callable[[Problem], list[list[int]]]

_LEAST_WAITS = (1.0, 0.5, 0.0)  # see insert_weight_grads
_MOST_REBUILT = 12  # plans
_MOST_TIME = 0.25  # share of the time for trying orders


def initial_plans(problem: Problem) -> Iterator[tuple[float, Plan]]:
    """Whole plans within memory, with their objective; at least one."""
    for plan in [one_by_one(problem), *_by_paper_planner(problem), *_by_families(problem)]:
        apart = split(problem, plan)
        for each in [plan] if apart == plan else [plan, apart]:
            value = problem.value_of_plan(each)
            if value < math.inf:
                yield value, each


def rebuilt_plans(problem: Problem, deadline: Deadline) -> list[Plan]:
    """Orders of families with their W's inserted anew: the best dozen, best first."""
    plans: list[Plan] = []
    seen: set[float] = set()
    for small_value, least_wait, make_order in _ranked(problem, deadline):
        if len(plans) == _MOST_REBUILT or deadline.over:
            break
        if small_value in seen:
            continue
        seen.add(small_value)
        order = make_order(problem)
        value, plan = insert_weight_grads(problem, order, least_wait) if order else (math.inf, [])
        if value < math.inf:
            plans.append(plan)
    return plans


def _ranked(problem: Problem, deadline: Deadline) -> list[tuple[float, float, MakeOrder]]:
    """(objective for few microbatches, least wait, order) of what fits, best first."""
    small = problem.with_microbatches(min(problem.num_microbatches, 3 * problem.num_ranks))
    found: list[tuple[float, float, MakeOrder]] = []
    met: list[list[list[int]]] = [[]]  # families may have the same order
    for make_order in orders(problem):
        order = make_order(small)
        if order not in met:
            met.append(order)
            for least_wait in _LEAST_WAITS:
                value, _ = insert_weight_grads(small, order, least_wait)
                if value < math.inf:
                    found.append((value, least_wait, make_order))
        if deadline.over or deadline.fraction > _MOST_TIME:
            break
    return sorted(found, key=lambda each: each[0])


def _by_paper_planner(problem: Problem) -> list[Plan]:
    """Empty where the paper's planner does not apply."""
    if problem.placement != "one":
        return []
    try:
        return [paper_plan(problem)]
    except PlanError:
        return []  # it has no whole backwards, which need less


def _by_families(problem: Problem) -> Iterator[Plan]:
    """The plans of this placement's families, whether they fit the memory or not."""
    for family in _own_families(problem):
        plan = _family_plan(family, problem)
        if plan:
            yield plan


def orders(problem: Problem) -> Iterator[MakeOrder]:
    """Functions that make an order: one per family with this placement."""
    for family in _own_families(problem):
        yield partial(_family_order, family)


def _own_families(problem: Problem) -> Iterator[Callable[..., Timetable]]:
    """The families with this placement, as one rank or two show it, cheaply."""
    per_rank = problem.num_stages // problem.num_ranks
    num_ranks = min(problem.num_ranks, 2)  # on one rank a V is a loop, too
    own = place_stages(num_ranks, problem.placement, per_rank)
    for family in FAMILIES.values():
        if "stages_per_rank" in inspect.signature(family).parameters:
            family = partial(family, stages_per_rank=per_rank)
        with suppress(PlanError):  # a family that refuses these numbers is left out
            if family(num_ranks, 4).rank_of == own:
                yield family


def _family_plan(family: Callable[..., Timetable], problem: Problem) -> Plan:
    """Empty if the family can't have these numbers of ranks and microbatches."""
    try:
        return problem.plan_of(family(problem.num_ranks, problem.num_microbatches))
    except PlanError:
        return []


def _family_order(family: Callable[..., Timetable], problem: Problem) -> list[list[int]]:
    plan = split(problem, _family_plan(family, problem))
    return [[a for a in row if op_of(a // problem.num_microbatches) != Op.W] for row in plan]


def split(problem: Problem, plan: Plan) -> Plan:
    """Each BW as B and W, one after the other."""
    number = problem.num_microbatches
    rows: Plan = []
    for row in plan:
        rows.append([])
        for a in row:
            f = a - op_of(a // number) * number
            is_whole = op_of(a // number) == Op.BW
            rows[-1] += (f + Op.B * number, f + Op.W * number) if is_whole else (a,)
    return rows

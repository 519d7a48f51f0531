"""`lower_bound`: the largest of all bounds; `certificate`: how far a plan is from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zbpp.planning.bounds.first_backward_bound import late_first_b
from zbpp.planning.bounds.idle_bound import Idle
from zbpp.planning.bounds.link_bound import link_bounds
from zbpp.planning.bounds.relaxation import Relaxation, after_last_b
from zbpp.planning.bounds.round_trip_bound import round_trips
from zbpp.planning.bounds.unequal_lengths import NamedBound, Units
from zbpp.planning.memory_limit import MemoryLimit, check_fits
from zbpp.planning.options import EQUAL, MAKESPAN, ROUNDING, objective_value
from zbpp.planning.problem import Problem
from zbpp.schedule.costs import Costs
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Op, PlanError, Timetable


@dataclass(frozen=True)
class Bound:
    """No plan takes less than `value` ms. argument: the proof that gives this value, in words."""

    value: float
    argument: str

    def gap(self, value: float) -> float:
        """How far a plan's time (ms) is above the bound, relative."""
        if self.value > 0:
            return value / self.value - 1
        return math.inf if value > 0 else 0.0


@dataclass(frozen=True)
class Certificate:
    """The time of a plan (ms), the time that no plan can undercut (ms), and gap = value / bound - 1."""

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
    num_slices: int = 1,
    costs: Costs = Costs(),
    memory_limit: MemoryLimit = None,
) -> Bound:
    """The largest of all lower bounds on a plan's "makespan" or "span" (the largest span of a rank).

    It holds for every timetable with the placement rank_of[stage] whose memory is within memory_limit after
    every action, whether backwards are split, whole or both. memory_limit: in the unit of costs.saved, one
    number for all ranks, or a list with one number per rank; None: no limit.
    Raises PlanError for an unknown objective, and for a limit that can't hold one microbatch.
    """
    return bound_of(Problem(tuple(rank_of), num_microbatches, costs, memory_limit, objective, num_slices))


def bound_of(problem: Problem) -> Bound:
    """`lower_bound` of a problem: for microbatches of different lengths, in their order."""
    if problem.has_lengths:
        return _of_lengths(problem, Units.in_order)
    return _of_equal(problem)


def bound_over_orders(problem: Problem) -> Bound:
    """The lower bound that holds whatever the order of the microbatches."""
    if not problem.costs.lengths:  # all microbatches are alike
        return bound_of(problem)
    return _of_lengths(problem, Units.over_orders)


def _of_lengths(problem: Problem, largest: Callable[[Units], NamedBound]) -> Bound:
    """The larger of a bound by lengths, and the bound if all units were as short as the shortest."""
    units = Units(problem)
    found = largest(units)
    shortest = _of_equal(problem.of_equal_units(units.smallest(range(problem.num_units))))
    value = found.value * (1 - ROUNDING) + problem.last_reduction
    return max(Bound(value, found.argument), shortest, key=lambda bound: bound.value)


def _of_equal(problem: Problem) -> Bound:
    relaxation = Relaxation(problem.without_past)
    follows = after_last_b(relaxation, problem.objective)
    idles = [Idle(relaxation, rank, after) for rank, after in enumerate(follows)]
    bounds = [bound for idle in idles for bound in _of_rank(relaxation, idle)]
    if problem.objective == MAKESPAN:
        bounds += [
            Bound(value, f"work of {_link_or_card(sender, receiver)}")
            for (sender, receiver), value in link_bounds(relaxation)
        ]
    best = max(bounds, key=lambda bound: bound.value)
    late = late_first_b(relaxation, idles, problem.objective, best.value)
    if late > best.value * (1 + ROUNDING):
        best = Bound(late, "first B's are late")
    # The last action of a step is the last W of some stage, whose gradients are then reduced.
    return replace(best, value=best.value + problem.last_reduction)


def _link_or_card(sender: int, receiver: int) -> str:
    """What `link_bounds` calls by these two ranks."""
    if sender == receiver:
        return f"the card of rank {sender}"
    return f"the link from rank {sender} to rank {receiver}"


def _of_rank(relaxation: Relaxation, idle: Idle) -> list[Bound]:
    """Three bounds on one rank: its work and its least idle time; round trips, and what follows its last B;
    its work, W's in exchanges not counted."""
    rank = idle.rank
    before = relaxation.first_f(rank) if relaxation.problem.objective == MAKESPAN else 0.0
    trips = round_trips(relaxation, rank)
    return [
        Bound(before + relaxation.work(rank) + idle.least, f"work and forced idle time of rank {rank}"),
        Bound(before + trips + idle.follows, f"round trips through the memory of rank {rank}"),
        Bound(before + relaxation.work_with_exchanges(rank), f"work of rank {rank} outside exchanges"),
    ]


def certificate(
    timetable: Timetable,
    costs: Costs = Costs(),
    objective: str = MAKESPAN,
    memory_limit: MemoryLimit = None,
) -> Certificate:
    """How far a timetable is from the best with its placement under the memory limit.

    proved_optimal: value and bound agree (see `tolerance`). The bound allows splits even if the
    timetable makes none. Raises PlanError as `simulate` and `lower_bound` do, and for a timetable
    that exceeds the limit or has no backwards.
    """
    counts = timetable.num_microbatches, timetable.num_slices
    problem = Problem(timetable.rank_of, counts[0], costs, memory_limit, objective, counts[1])
    bound = bound_of(problem)
    timeline = simulate(timetable, costs)
    if all((row.ops == Op.F).all() for row in timetable.rows):
        raise PlanError("the timetable has no backward: bounds are for training steps")
    check_fits("the timetable", timeline.peak_memory, problem.limits, costs.memory_unit)
    value = objective_value(timeline, objective)
    gap = bound.gap(value)
    return Certificate(value, bound.value, bound.argument, gap, proved_optimal=gap <= EQUAL)

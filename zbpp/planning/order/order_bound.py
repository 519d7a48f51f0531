"""What no order of the microbatches can undercut in one timetable.

The bounds of `zbpp.planning.bounds` hold for every timetable. In a given one, every path through its
dependencies bounds every order: the path takes a fixed amount of whatever microbatch is at each place. By the
rearrangement inequality the sum is least if the longest microbatch is where the path takes least.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zbpp.planning.bounds import bound_over_orders
from zbpp.planning.bounds.relaxation import Relaxation
from zbpp.planning.longest_paths import Floats
from zbpp.planning.memory_limit import MemoryLimit
from zbpp.planning.options import ROUNDING
from zbpp.planning.order.batched_timing import BatchedTiming, PathTerms
from zbpp.planning.problem import Problem
from zbpp.schedule.costs import Costs
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import PlanError, Timetable

_PATHS = 12  # that are tried: that of equal lengths, then that of the best order for the path before


def order_bound(timetable: Timetable, costs: Costs, memory_limit: MemoryLimit = None) -> float:
    """The makespan (ms) that no order of the microbatches undercuts in this timetable.

    Raises PlanError as `simulate` does, and for a memory limit that can't hold the longest microbatch.
    """
    if not costs.lengths:
        return simulate(timetable, costs).makespan
    problem = Problem(
        timetable.rank_of, timetable.num_microbatches, costs, memory_limit, num_slices=timetable.num_slices
    )
    bound = bound_over_orders(problem).value
    if costs.has_exchange:  # a path then takes less of W's than their durations
        return bound
    timing = BatchedTiming(timetable, costs)
    ascending = np.sort(timing.lengths)
    in_order, paths = np.full(len(ascending), ascending.mean()), []
    for _ in range(_PATHS):
        terms = timing.critical_path(in_order)
        paths.append(_least(terms, ascending))
        in_order[np.argsort(-_weights(terms, ascending), kind="stable")] = ascending
    return max(bound, max(paths) * (1 - ROUNDING) + problem.last_reduction)


def own_path(rank_of: Sequence[int], costs: Costs) -> float:
    """How long (ms) the longest microbatch alone takes from its first F to its last B.

    Raises PlanError for costs without lengths.
    """
    if not costs.lengths:
        raise PlanError("these costs have no lengths: write Costs.of_lengths(...)")
    lone = Problem(tuple(rank_of), 1, costs.of_length(max(costs.lengths)))
    return Relaxation(lone).round_trip(0)


def _least(terms: PathTerms, ascending: Floats) -> float:
    """The least that a path takes in any order: its two sums, each at its own best order (ms)."""
    linear, quadratic = (np.sort(each)[::-1] for each in (terms.linear, terms.quadratic))
    return float(linear @ ascending + quadratic @ ascending**2) + terms.fixed


def _weights(terms: PathTerms, lengths: Floats) -> npt.NDArray[np.float64]:
    """How much more the path takes for a longer microbatch at each place, at the mean length."""
    return terms.linear + 2 * float(lengths.mean()) * terms.quadratic

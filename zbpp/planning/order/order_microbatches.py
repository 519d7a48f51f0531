"""The order of microbatches of different lengths: the hill, and a local search from there.

Nothing fills a pipeline's first and last moments, and the first and the last microbatch decide how long these
are. So short microbatches go first and last, the long ones in the middle:

    lengths         5 1 4 2 3 6
    sorted          1 2 3 4 5 6
    the hill        1 3 5 6 4 2      every second one up, the rest down

Then the longest microbatches are in memory together. Where a memory limit forbids this, the search begins
with an order in which long and short ones alternate.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zbpp.planning.longest_paths import Floats, Numbers
from zbpp.planning.memory_limit import MemoryLimit, ceiling, check_fits, limits_per_rank
from zbpp.planning.options import ROUNDING
from zbpp.planning.order.batched_timing import BatchedTiming
from zbpp.planning.search.deadline import Deadline
from zbpp.schedule.costs import Costs
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import PlanError, Timetable

_ORDERS = 8  # tried in a round
_MOST_NUMBERS = 1_000_000  # actions times orders in a round
_MORE_CHANGES = 0.4  # how often a neighbour is one more change away
_MOST_QUIET = 200  # rounds without a better order, then the search ends


def order_microbatches(
    timetable: Timetable,
    costs: Costs,
    time_limit: float = 0.05,
    memory_limit: MemoryLimit = None,
    *,
    seed: int = 0,
    num_rounds: int | None = None,
) -> list[int]:
    """The best order found within `time_limit` (s): order[i] is the microbatch that goes i-th.

    `costs.reordered(order)` are the costs of the step in this order. Its makespan is never above that of the
    given order, unless the given order exceeds the memory limit. The hill is tried even if the time is over.
    memory_limit: in the unit of costs.saved, one number for all ranks, or a list with one per rank.
    seed: the same seed gives the same order, unless the time ran out. num_rounds: of the search at most; with
    time_limit=math.inf the order then depends on the arguments alone.
    Costs without lengths keep the given order.
    Raises PlanError if no order within memory_limit was found, and as `simulate` does.
    """
    best = least_excess(timetable, costs, time_limit, memory_limit, seed=seed, num_rounds=num_rounds)
    best.check(costs.memory_unit)
    return best.order


class BestOrder(NamedTuple):
    """order[i]: the microbatch that goes i-th. peaks: what each rank holds in it. limits: of each rank."""

    order: list[int]
    peaks: tuple[float, ...]
    limits: tuple[float, ...]

    @property
    def excess(self) -> float:
        """By which share the limit is exceeded on the rank where this is most; 0 within the limits."""
        return float(_excess(np.array(self.peaks), np.array([*map(ceiling, self.limits)])))

    def check(self, unit: str) -> None:
        """Raise PlanError, with what the order needs, unless it is within the limits."""
        check_fits("the best order found", self.peaks, self.limits, unit)

    def refusal(self, unit: str) -> str:
        """The text of `check`'s error; "" within the limits."""
        try:
            self.check(unit)
        except PlanError as error:
            return str(error)
        return ""


def least_excess(
    timetable: Timetable,
    costs: Costs,
    time_limit: float,
    memory_limit: MemoryLimit,
    sizes: Sequence[float] | None = None,
    *,
    seed: int = 0,
    num_rounds: int | None = None,
) -> BestOrder:
    """As `order_microbatches`, but if no order is within memory_limit, return the one that exceeds it least.

    sizes: the memory of each microbatch, in multiples of the memory of a microbatch of length 1; None: equal
    to the lengths. Sizes and lengths differ if a microbatch has several rows: its memory grows with its
    tokens, its time also with the squares of its rows' lengths.

    The order returned never exceeds memory_limit by more than the given order does. If both exceed it by the
    same amount, the returned order's makespan is at most that of the given order.
    """
    deadline = Deadline(time_limit)
    given = list(range(timetable.num_microbatches))
    limits = limits_per_rank(memory_limit, timetable.num_ranks)
    orders = [given]
    if costs.lengths:
        orders.append(_Search(BatchedTiming(timetable, costs, sizes), limits, seed).run(deadline, num_rounds))
    held = costs if sizes is None else Costs.of_lengths(sizes, costs)

    def worth(best: BestOrder) -> _Worth:
        return _Worth(best.excess, simulate(timetable, costs.reordered(best.order)).makespan)

    peaks = [simulate(timetable, held.reordered(order)).peak_memory for order in orders]
    return min((BestOrder(*each, limits) for each in zip(orders, peaks, strict=True)), key=worth)


def hill(lengths: Floats) -> Numbers:
    """Short microbatches first and last, long ones in the middle."""
    ascending = np.argsort(lengths, kind="stable")
    return np.concatenate([ascending[::2], ascending[1::2][::-1]])


def alternating(lengths: Floats) -> Numbers:
    """A short microbatch after each long one, so that few long ones are in memory together."""
    ascending = np.argsort(lengths, kind="stable")
    half = (len(ascending) + 1) // 2
    order = np.empty_like(ascending)
    order[::2], order[1::2] = ascending[:half], ascending[half:][::-1]
    return order


class _Worth(NamedTuple):
    """The less the better: first how far the memory limit is exceeded, then the makespan (ms)."""

    excess: float
    makespan: float


def _excess(peaks: Floats, ceilings: Floats) -> Floats:
    """`BestOrder.excess`; the first dimension is that of ranks. What rounding makes different is equal."""
    shares = peaks / np.maximum(ceilings, np.finfo(float).tiny)
    excess: Floats = np.maximum(0.0, shares - 1).round(9).max(axis=0)
    return excess


class _Search:
    """The best order so far. A round tries some of its neighbours, and keeps the best unless it is worse.

    A neighbour is a few changes away: two microbatches swapped, or one at another place.
    """

    def __init__(self, timing: BatchedTiming, limits: tuple[float, ...], seed: int) -> None:
        self.timing, self.rng = timing, random.Random(seed)
        self.ceilings = np.array([ceiling(limit) for limit in limits])
        self.num_orders = min(_ORDERS, max(1, _MOST_NUMBERS // timing.paths.none))
        given = np.arange(len(timing.lengths))
        starts = np.stack([given, hill(timing.lengths), alternating(timing.lengths)], axis=1)
        self.worth, self.order = self._best(starts)

    def run(self, deadline: Deadline, num_rounds: int | None = None) -> list[int]:
        num_quiet = num_done = 0
        while (
            num_quiet < _MOST_QUIET and len(self.order) > 1 and num_done != num_rounds and not deadline.over
        ):
            num_done += 1
            worth, order = self._best(self._neighbours())
            is_better = worth < self.worth._replace(makespan=self.worth.makespan * (1 - ROUNDING))
            num_quiet = 0 if is_better else num_quiet + 1
            if worth <= self.worth:  # equals, too, so that the order drifts
                self.worth, self.order = worth, order
        return [int(each) for each in self.order]

    def _best(self, orders: Numbers) -> tuple[_Worth, Numbers]:
        makespans, excess = self.timing.makespans(orders), np.zeros(orders.shape[1])
        if np.isfinite(self.ceilings).any():
            excess = _excess(self.timing.peaks(orders), self.ceilings[:, None])
        best = int(np.lexsort((makespans, excess))[0])
        return _Worth(float(excess[best]), float(makespans[best])), orders[:, best]

    def _neighbours(self) -> Numbers:
        """One order a column."""
        return np.array([self._neighbour() for _ in range(self.num_orders)]).T

    def _neighbour(self) -> list[int]:
        order: list[int] = self.order.tolist()
        num_changes = 1
        while self.rng.random() < _MORE_CHANGES:  # several at once leave what one change can't improve
            num_changes += 1
        for _ in range(num_changes):
            one, other = self.rng.randrange(len(order)), self.rng.randrange(len(order))
            if self.rng.random() < 0.5:
                order[one], order[other] = order[other], order[one]
            else:
                order.insert(other, order.pop(one))
        return order

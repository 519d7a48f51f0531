"""Lower bounds for units of different lengths: microbatches in their order, or over all orders.

No cost falls with the length or the square, so a unit with less of both in place of another never makes a
step longer. That gives three bounds; `first` is the unit of a stage's first F, `last` that of its last B:
without slices the first and the last microbatch of the order, with slices their first slices. The waits that
slices add are those of relaxation.py, between F's of the first microbatch and B's of the last one.

**Work.** A rank's first F waits for F's of `first` on the stages before it. Its own work does not depend on
the order. What follows its last B is that of `last`, see `after_last_b`. Until its first B a rank runs F's
only, from its last F to its last B only B's and W's; what they don't fill is idle time.

**A unit's own path.** Before F of unit k its stage runs the F's of the units before k, after B of k the B's
of those whose B's come later:

    F(s,0) .. F(s,k-1) | F(s,k) -> ... -> F(S-1,k) -> B(S-1,k) -> ... -> B(s,k) | B(s,..) .. B(s,last)

After B of k come the B's of `last` on the stages before s, too; or, on the stage's rank, the W's of k and of
those after k.

**Memory.** The bound for units that are all as short as the shortest one, within the same limit.

Over all orders, `first` and `last` are units of the two shortest microbatches. A unit of a microbatch beside
k's counts with the smaller of its F and its B (with its W), whichever side of k it is on; an earlier slice of
k's own microbatch counts with both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.planning.bounds.relaxation import Relaxation, after_last_b
from zbpp.planning.options import MAKESPAN
from zbpp.planning.problem import Extent, Problem
from zbpp.schedule.timetable import Op, units_in_order
from zbpp.schedule.units import unit_of

Floats = npt.NDArray[np.float64]


class NamedBound(NamedTuple):
    """A bound (ms), and what it is made of."""

    value: float
    argument: str


class Units:
    """The units of a problem, each relaxed alone. Arrays by unit and stage, in the order of F's."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.num_slices = problem, problem.num_slices
        self.extents = [problem.extent(unit) for unit in range(problem.num_units)]
        self._of_extent: dict[Extent, Relaxation] = {}
        self.alone = [self._relaxed(each) for each in self.extents]
        self.f, self.b, self.w = (
            np.array([[getattr(stage, op) for stage in each.stages] for each in self.alone]) for op in "fbw"
        )
        stages = range(problem.num_stages)
        self.round_trips = np.array([[each.round_trip(stage) for stage in stages] for each in self.alone])
        # The place of each unit's B among the B's of a stage.
        self.place = units_in_order(Op.B, np.arange(problem.num_units, dtype=np.int32), self.num_slices)

    def _relaxed(self, extent: Extent) -> Relaxation:
        if extent not in self._of_extent:
            self._of_extent[extent] = Relaxation(self.problem.of_one_unit(extent))
        return self._of_extent[extent]

    def smallest(self, units: Iterable[int]) -> Extent:
        """The least length and the least square of these units."""
        lengths, squares = zip(*(self.extents[unit] for unit in units), strict=True)
        return Extent(min(lengths), min(squares))

    def in_order(self) -> NamedBound:
        """The largest bound for the given order."""
        work, last = self.b + self.w, self.problem.num_units - self.num_slices
        before = np.cumsum(self.f, axis=0) - self.f
        paths = self._paths(
            before + self._after(self.b), before + self._after(work), self.alone[0], self.alone[last]
        )
        return max(self._work(0, last), paths)

    def _after(self, times: Floats) -> Floats:
        """By unit, the sum of the times of the units whose B's come later."""
        in_place = times[self.place]
        later: Floats = (in_place.sum(axis=0) - np.cumsum(in_place, axis=0))[self.place]
        return later

    def over_orders(self) -> NamedBound:
        """The largest bound that holds for every order of the microbatches."""
        by_length = sorted(range(0, len(self.extents), self.num_slices), key=lambda unit: self.extents[unit])
        one, other = by_length[0], by_length[1 if len(by_length) > 1 else 0]
        paths = self._paths(
            self._beside(self.b), self._beside(self.b + self.w), self.alone[one], self.alone[one]
        )
        return max(min(self._work(one, other), self._work(other, one)), paths)

    def _beside(self, times: Floats) -> Floats:
        """By unit, what other units take before its F or after its B at least; times: of their B's."""
        either, both = (
            each.reshape(-1, self.num_slices, each.shape[1])
            for each in (np.minimum(self.f, times), self.f + times)
        )
        others = either.sum(axis=(0, 1)) - either.sum(axis=1, keepdims=True)
        earlier = np.cumsum(both, axis=1) - both
        beside: Floats = (others + earlier).reshape(self.f.shape)
        return beside

    def _work(self, first: int, last: int) -> NamedBound:
        """The largest bound by a rank's work. first, last: the first slices of these microbatches."""
        is_makespan = self.problem.objective == MAKESPAN
        # The spans' clocks start at their own first F's: a unit that is no longer than both counts.
        end = self.alone[last] if is_makespan else self._relaxed(self.smallest((first, last)))
        follows = after_last_b(end, self.problem.objective)
        bounds = []
        for rank in range(self.problem.num_ranks):
            begin = self.alone[first].first_f(rank) if is_makespan else 0.0
            idle = max(self._head(rank, first), self._rest(rank, last, follows[rank]))
            bounds.append(NamedBound(begin + self._sum(rank, "fbw") + idle, f"work of rank {rank}"))
        return max(bounds)

    def _sum(self, rank: int, ops: str) -> float:
        stages = self.problem.stages_of[rank]
        return float(sum(getattr(self, op)[:, stages].sum() for op in ops))

    def _head(self, rank: int, first: int) -> float:
        """The idle time before the first B: one stage runs F of all slices of the first microbatch."""
        slices = slice(first, first + self.num_slices)
        one, other = self.alone[slices][0], self.alone[slices][-1]
        lowest, highest = one.lowest(rank), one.highest(rank)
        until_first_b = max(
            one.f_start[stage] - one.f_start[lowest]
            + float(self.f[slices, stage].sum())
            + other.b_start[highest] - other.f_end[stage]
            for stage in range(lowest, self.problem.num_stages)
        )  # fmt: skip
        return max(0.0, until_first_b - self._sum(rank, "f"))

    def _rest(self, rank: int, last: int, follows: float) -> float:
        """The idle time from the last F on, at the best amount of W's left after the last B."""
        alone, weights = self.alone[last], self._sum(rank, "w")
        most = self._sum(rank, "bw")
        needed = self._after_last_f(rank, last)
        least = min(alone.stages[alone.lowest(rank)].w, weights)
        tried = np.clip([least, weights, follows, most - needed], least, weights)
        return float((np.maximum(0.0, needed - most + tried) + np.maximum(0.0, follows - tried)).min())

    def _after_last_f(self, rank: int, last: int) -> float:
        """The time from the last F to the last B: one stage runs B of all slices of the last microbatch."""
        slices = slice(last, last + self.num_slices)
        one, other = self.alone[slices][-1], self.alone[slices][0]
        lowest, highest = one.lowest(rank), one.highest(rank)
        return max(
            one.b_start[stage] - one.f_end[highest]
            + float(self.b[slices, stage].sum())
            + other.b_end[lowest] - other.b_end[stage]
            for stage in range(lowest, self.problem.num_stages)
        )  # fmt: skip

    def _paths(self, with_b: Floats, with_w: Floats, first: Relaxation, last: Relaxation) -> NamedBound:
        """The largest bound by a unit's own path.

        with_b: the F's before it on each stage, and the B's after it; with_w: the F's, B's and W's.
        """
        b_end = np.array(last.b_end)
        if self.problem.objective == MAKESPAN:
            begin, below = np.array(first.f_start), np.maximum.accumulate(last.w_end) - b_end
        else:
            begin, below = np.zeros(len(b_end)), np.zeros(len(b_end))
        paths = begin + self.round_trips + np.maximum(with_b + np.maximum(0.0, below), with_w + self.w)
        unit, stage = np.unravel_index(int(paths.argmax()), paths.shape)
        name = unit_of(int(unit), self.num_slices)
        return NamedBound(
            float(paths[unit, stage]),
            f"path of {'microbatch' if self.num_slices == 1 else 'slice'} {name} from stage {stage} and back",
        )

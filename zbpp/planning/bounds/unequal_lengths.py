"""Lower bounds for microbatches of different lengths, in their order or over all orders.

No cost falls with the length, so a shorter microbatch in place of another never makes a step longer. That
gives three bounds; `first` and `last` are the first and the last microbatch of the order.

**Work.** A rank's first F waits for F's of `first` on the stages before it. Its own work does not depend on
the order. What follows its last B is that of `last`, see `after_last_b`. Until its first B a rank runs F's
only, from its last F to its last B only B's and W's; what they don't fill is idle time.

**A microbatch's own path.** F's of a stage ascend in microbatch, and so do its B's. Before F of microbatch k
the stage runs the F's of the microbatches before k, after B of k the B's of those after k:

    F(s,0) .. F(s,k-1) | F(s,k) -> ... -> F(S-1,k) -> B(S-1,k) -> ... -> B(s,k) | B(s,k+1) .. B(s,m-1)

After B of k come the B's of `last` on the stages before s, too; or, on the stage's rank, the W's of k and of
those after k.

**Memory.** The bound for microbatches that are all as short as the shortest one, within the same limit.

Over all orders, `first` and `last` are the two shortest, and a microbatch beside k counts with the smaller of
its F and its B (with its W), whichever side of k it is on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.planning.bounds.relaxation import Relaxation, after_last_b
from zbpp.planning.options import MAKESPAN
from zbpp.planning.problem import Problem

Floats = npt.NDArray[np.float64]


class LengthBound(NamedTuple):
    """A bound (ms), and what it is made of."""

    value: float
    argument: str


class Microbatches:
    """The microbatches of a problem, each relaxed alone. Arrays by microbatch and stage."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        by_length: dict[float, Relaxation] = {}
        for microbatch in range(problem.num_microbatches):
            length = problem.length(microbatch)
            if length not in by_length:
                by_length[length] = Relaxation(problem.of_microbatch(microbatch))
        self.alone = [by_length[problem.length(each)] for each in range(problem.num_microbatches)]
        self.shortest = sorted(range(problem.num_microbatches), key=problem.length)[:2]
        self.f, self.b, self.w = (
            np.array([[getattr(stage, op) for stage in each.stages] for each in self.alone]) for op in "fbw"
        )
        stages = range(problem.num_stages)
        self.round_trips = np.array([[each.round_trip(stage) for stage in stages] for each in self.alone])

    def in_order(self) -> LengthBound:
        """The largest bound for the given order."""
        work = self.b + self.w
        before, after_b, after_w = (
            np.cumsum(self.f, axis=0) - self.f,
            self.b.sum(axis=0) - np.cumsum(self.b, axis=0),
            work.sum(axis=0) - np.cumsum(work, axis=0),
        )
        paths = self._paths(before + after_b, before + after_w, self.alone[0], self.alone[-1])
        return max(self._work(0, self.problem.num_microbatches - 1), paths)

    def over_orders(self) -> LengthBound:
        """The largest bound that holds for every order."""
        one, other = self.shortest[0], self.shortest[-1]
        either_b, either_w = np.minimum(self.f, self.b), np.minimum(self.f, self.b + self.w)
        paths = self._paths(
            either_b.sum(axis=0) - either_b,
            either_w.sum(axis=0) - either_w,
            self.alone[one],
            self.alone[one],
        )
        return max(min(self._work(one, other), self._work(other, one)), paths)

    def _work(self, first: int, last: int) -> LengthBound:
        """The largest bound by a rank's work."""
        is_makespan = self.problem.objective == MAKESPAN
        # The spans' clocks start at their own first F's: one microbatch that is no longer than both counts.
        end = last if is_makespan else min(first, last, key=self.problem.length)
        follows = after_last_b(self.alone[end], self.problem.objective)
        bounds = []
        for rank in range(self.problem.num_ranks):
            begin = self.alone[first].first_f(rank) if is_makespan else 0.0
            idle = max(self._head(rank, first), self._rest(rank, last, follows[rank]))
            bounds.append(LengthBound(begin + self._sum(rank, "fbw") + idle, f"work of rank {rank}"))
        return max(bounds)

    def _sum(self, rank: int, ops: str) -> float:
        stages = self.problem.stages_of[rank]
        return float(sum(getattr(self, op)[:, stages].sum() for op in ops))

    def _head(self, rank: int, first: int) -> float:
        return max(0.0, self.alone[first].until_first_b(rank) - self._sum(rank, "f"))

    def _rest(self, rank: int, last: int, follows: float) -> float:
        """The idle time from the last F on, at the best amount of W's left after the last B."""
        alone, weights = self.alone[last], self._sum(rank, "w")
        most = self._sum(rank, "bw")
        needed = alone.after_last_f(rank)
        least = min(alone.stages[alone.lowest(rank)].w, weights)
        tried = np.clip([least, weights, follows, most - needed], least, weights)
        return float((np.maximum(0.0, needed - most + tried) + np.maximum(0.0, follows - tried)).min())

    def _paths(self, with_b: Floats, with_w: Floats, first: Relaxation, last: Relaxation) -> LengthBound:
        """The largest bound by a microbatch's own path.

        with_b: the F's of the microbatches before it on each stage, and the B's of those after it; with_w:
        the F's, B's and W's.
        """
        b_end = np.array(last.b_end)
        if self.problem.objective == MAKESPAN:
            begin, below = np.array(first.f_start), np.maximum.accumulate(last.w_end) - b_end
        else:
            begin, below = np.zeros(len(b_end)), np.zeros(len(b_end))
        paths = begin + self.round_trips + np.maximum(with_b + np.maximum(0.0, below), with_w + self.w)
        microbatch, stage = np.unravel_index(int(paths.argmax()), paths.shape)
        return LengthBound(
            float(paths[microbatch, stage]), f"path of microbatch {microbatch} from stage {stage} and back"
        )

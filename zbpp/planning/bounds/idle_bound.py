"""How long a rank must idle, because memory fills up or because a microbatch takes its time to come back.

A rank's first action is an F of microbatch 0 on its lowest stage; its first B is that of microbatch 0 on
its highest stage. Its last F is on its highest stage, its last B on its lowest: a microbatch passes the
rank's stages in ascending order, and microbatches ascend.

    |F F F F ....|B  F  B  W  B  W F|B W B W ....B|W W
     head: only F's                  tail: no F's  after

**Head.** Until its first B a rank can only run F's. Nothing that they hold is freed, so it runs at most as
many as memory holds. From the start of its first F to the start of its first B passes `until_first_b` at
least; what the F's don't fill is idle time.

**Tail.** From its last F to its last B a rank can only run B's and W's of microbatches that were held when
the last F ended. Let `a` of these microbatches wait for B and `x` for W, within memory. Up to the end of
the last B the rank runs `a` B's, and the W's of these a + x microbatches except `y`, which it runs after that
B. From the end of its last F to the end of its last B passes `after_last_f` at least; what the B's and W's
don't fill is idle time.

**After.** The `y` W's that are left take a time Y, at least that of one W. Something else may have to follow
the last B and take a time X, such as the B's of the stages below. Then X - Y more is lost. A large Y fills
that time but leaves the tail empty, so the bound is the least of tail(y) + max(0, X - Y) over all y.

Head and tail don't overlap if the first B comes before the last F. The other case is that a rank runs all
its F's first, if memory lets it. Then only the larger of the two idle times counts. The bound is the smaller
of the two cases.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import numpy.typing as npt

from zbpp.planning.bounds.relaxation import Relaxation, StageTerms

Counts = npt.NDArray[np.int64]


class Idle:
    """The least idle times of one rank."""

    def __init__(self, relaxation: Relaxation, rank: int, follows: float) -> None:
        """follows: the time X (ms) that must pass after the rank's last B."""
        problem = relaxation.problem
        self.rank, self.follows = rank, follows
        self.number, self.limit = problem.num_units, problem.ceilings[rank]
        self.is_one_microbatch = problem.num_microbatches == 1
        self.stages = relaxation.stages_on(rank)
        self.alike = len(set(self.stages)) == 1  # then only the number of actions matters
        self.count = self.number * len(self.stages)  # of F's
        self.forward_work = self.number * sum(stage.f for stage in self.stages)
        self.until_first_b = relaxation.until_first_b(rank)
        self.after_last_f = relaxation.after_last_f(rank)
        held = self.number * sum(stage.saved for stage in self.stages)
        self.may_run_all_forwards = held <= self.limit
        self.most_forwards = self._most_forwards()
        lowest, highest = relaxation.lowest(rank), relaxation.highest(rank)
        until_highest = relaxation.f_start[highest] - relaxation.f_start[lowest]
        forwards_last = until_highest + self.number * self.stages[-1].f
        self.idle_among_forwards = max(0.0, forwards_last - self.forward_work)

    @cached_property
    def least(self) -> float:
        """Idle time of the rank up to its last B, plus what it loses after that B."""
        if self.is_one_microbatch:  # the last F comes before the first B
            return self.all_forwards_first
        mixed = self.head + self.rest
        return min(mixed, self.all_forwards_first) if self.may_run_all_forwards else mixed

    @cached_property
    def head(self) -> float:
        """Idle time before the first B, if an F comes after that B."""
        return max(0.0, self.until_first_b - self.forwards_before_b)

    @cached_property
    def rest(self) -> float:
        """Idle time in the tail plus what is lost after it, if an F comes after the first B."""
        if not self.alike:
            return max(0.0, self.after_last_f - self._most_backward_work() + self.follows)
        waiting = np.arange(1, max(2, self.most_forwards + 1))
        return self._rest_alike(waiting)

    def _most_forwards(self) -> int:
        """How many F's memory holds before the first B, if an F comes after that B (stages alike)."""
        saved = self.stages[0].saved
        fit = math.floor(self.limit / saved) if saved * self.count > self.limit else self.count
        return min(fit, self.count - 1)

    @cached_property
    def forwards_before_b(self) -> float:
        """The most time that F's can take before the first B, if an F comes after that B.

        Where stages differ, microbatch 0 has run on all of them. The other F's count as if they could be cut
        in parts, but no stage is ahead of a lower stage of the rank.
        """
        if self.alike:
            return self.most_forwards * self.stages[0].f
        certain, memory_left = sum(stage.f for stage in self.stages), self._beside_the_first()
        blocks = [(memory, work, self.number - 1) for memory, work in self._forward_blocks()]
        return min(certain + _best_fill(blocks, memory_left), self.forward_work - self.stages[-1].f)

    def _beside_the_first(self) -> float:
        """Memory beside microbatch 0. Where all stages hold the same amount, a multiple of this amount."""
        held = [stage.saved for stage in self.stages]
        unit = held[0] if min(held) == max(held) > 0 and not math.isinf(self.limit) else 0.0
        limit = math.floor(self.limit / unit) * unit if unit else self.limit
        return max(0.0, limit - sum(held))

    def _forward_blocks(self) -> list[tuple[float, float]]:
        """(memory, work) of F's on consecutive stages, joined while a later one has more work per memory."""
        blocks: list[tuple[float, float]] = []
        for stage in self.stages:
            memory, work = stage.saved, stage.f
            while blocks and work * blocks[-1][0] > blocks[-1][1] * memory:
                before = blocks.pop()
                memory, work = memory + before[0], work + before[1]
            blocks.append((memory, work))
        return blocks

    def _rest_alike(self, waiting: Counts) -> float:
        """The least of tail(y) + max(0, X - y w) over y and over all that can wait for B and for W."""
        stage = self.stages[0]
        deferred = self._fit_deferred(waiting)
        backwards = waiting + deferred  # W's that are left
        work = waiting * stage.b + backwards * stage.w
        # most[n]: the most work with n or more W's left
        order = np.argsort(backwards, kind="stable")
        backwards, work = backwards[order], work[order]
        most = np.maximum.accumulate(work[::-1])[::-1]
        enough = math.ceil(self.follows / stage.w) + 1 if stage.w > 0 else 1
        after = np.arange(1, min(enough, int(backwards[-1])) + 1)
        chosen = most[np.searchsorted(backwards, after)]
        tail = np.maximum(0.0, self.after_last_f - chosen + after * stage.w)
        return float((tail + np.maximum(0.0, self.follows - after * stage.w)).min())

    def _fit_deferred(self, waiting: Counts) -> Counts:
        """How many microbatches can wait for W, by the number of microbatches that wait for B."""
        stage = self.stages[0]
        others = self.count - waiting
        if stage.deferred * self.count <= 0 or math.isinf(self.limit):
            return others
        fit = np.floor(np.maximum(0.0, self.limit - waiting * stage.saved) / stage.deferred)
        fitted: Counts = np.minimum(others, fit).astype(np.int64)
        return fitted

    def _most_backward_work(self) -> float:
        """The most time of the B's and W's that memory can hold at the last F, where stages differ.

        One microbatch per stage certainly waits for its B. Each of the others may wait for W (memory
        `deferred`, work w) or for B (`saved`, b + w), and counts as if it could be cut.
        """
        certain = sum(stage.b + stage.w for stage in self.stages)
        memory_left = max(0.0, self.limit - sum(stage.saved for stage in self.stages))
        pieces = [piece for stage in self.stages for piece in _pieces(stage, self.number - 1)]
        return certain + _best_fill(pieces, memory_left)

    @cached_property
    def all_forwards_first(self) -> float:
        """`least`, if all F's come before the first B: head and tail overlap then."""
        before = self.until_first_b - self.forward_work
        backward = self.number * sum(stage.b + stage.w for stage in self.stages)
        weights = self.number * sum(stage.w for stage in self.stages)
        tail = max(0.0, self.after_last_f - backward + self.follows)
        return max(before, self.idle_among_forwards + tail, before + self.follows - weights)


def _pieces(stage: StageTerms, number: int) -> list[tuple[float, float, int]]:
    """(memory, work, how many) of the best ways to fill memory: the concave hull of the choices."""
    more_for_b = stage.saved - stage.deferred
    if stage.w * more_for_b > stage.b * stage.deferred:
        return [(stage.deferred, stage.w, number), (more_for_b, stage.b, number)]
    return [(stage.saved, stage.b + stage.w, number)]


def _best_fill(pieces: list[tuple[float, float, int]], memory_left: float) -> float:
    """The most work that fits: a fractional knapsack of pieces (memory, work, how many)."""
    total = 0.0
    for memory, work, number in sorted(
        pieces, key=lambda piece: piece[1] / (piece[0] or 1e-300), reverse=True
    ):
        taken = min(float(number), memory_left / memory) if memory > 0 else float(number)
        total += taken * work
        memory_left -= taken * memory if memory > 0 else 0.0
    return total

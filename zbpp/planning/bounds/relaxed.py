"""The problem as the bounds see it: no action longer, nothing held longer than some plan needs.

A bound must hold for plans that split every backward, none, or some. One relaxation covers them:
each backward is a B of `min(b, bw)` and a W of what is left of `min(b + w, bw)`. Any plan becomes
one of these, none of its spans longer, by cutting each action down from its end, a BW into B and
W. Memory never rises by that either, if what B leaves counts as `min(deferred, saved)`. Without
splits the whole BW is the B, and the W is empty.

Chains. F's and B's of one microbatch follow each other through all stages, with a message wherever
the rank changes:

    F(0) -> F(1) -> ... -> F(S-1) -> B(S-1) -> ... -> B(1) -> B(0) -> W(0)

`down[s]` is the least time from the start of F(0) to the start of F(s); `up[s]` from the end
of B(s) to the end of B(0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from zbpp.schedule.costs import Costs
from zbpp.schedule.timetable import Op, PlanError

ROUNDING = 1e-9  # relative: what sums of floats may be off by, always in the favour of plans


class StageTerms(NamedTuple):
    """One stage, relaxed. Times in ms, memory in the unit of the costs."""

    f: float
    b: float
    w: float
    saved: float
    deferred: float

    @property
    def work(self) -> float:
        return self.f + self.b + self.w


class Relaxed:
    """A placement with relaxed costs, chains and limits. Raises PlanError for what no plan fits."""

    def __init__(
        self,
        rank_of: Sequence[int],
        num_microbatches: int,
        costs: Costs,
        memory_limit: float | Sequence[float] | None,
        splits: bool,
    ) -> None:
        self.rank_of, self.num_microbatches = tuple(rank_of), num_microbatches
        self.num_stages = len(self.rank_of)
        self.num_ranks = max(self.rank_of, default=-1) + 1
        if num_microbatches < 1 or not self.rank_of or set(self.rank_of) != set(range(self.num_ranks)):
            raise PlanError(
                f"no bound for {num_microbatches} microbatches on rank_of={self.rank_of}: "
                "write 1 microbatch or more, and a rank per stage, 0..p-1 without a gap"
            )
        self.stages = _terms(costs, self.num_stages, splits)
        self.comm = costs.per_stage(self.num_stages).comm
        self.limits = self._limits(memory_limit)
        self.owned = self._owned()
        self.down, self.up = self._chains()
        self._check_limits()

    def _limits(self, limit: float | Sequence[float] | None) -> list[float]:
        if limit is None:
            return [math.inf] * self.num_ranks
        limits = [float(each) for each in limit] if isinstance(limit, Sequence) else [limit] * self.num_ranks
        if len(limits) != self.num_ranks:
            raise PlanError(f"memory_limit has {len(limits)} numbers for {self.num_ranks} ranks")
        return limits

    def _owned(self) -> list[list[int]]:
        owned: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.rank_of):
            owned[rank].append(stage)
        return owned

    def _check_limits(self) -> None:
        """B(s,0) of any stage comes after F(S-1,0): then a rank holds microbatch 0 on all its stages."""
        for rank, limit in enumerate(self.limits):
            least = sum(self.stages[stage].saved for stage in self.owned[rank])
            if not least <= limit * (1 + ROUNDING):
                raise PlanError(
                    f"memory_limit={limit:g} on rank {rank} can't hold one microbatch: {least:g} is the least"
                )

    def _chains(self) -> tuple[list[float], list[float]]:
        down, up = [0.0], [0.0]
        for stage in range(1, self.num_stages):
            before, here = stage - 1, stage
            apart = self.rank_of[before] != self.rank_of[here]
            down.append(down[-1] + self.stages[before].f + apart * self.comm[before])
            up.append(up[-1] + self.stages[before].b + apart * self.comm[here])
        return down, up

    @cached_property
    def turn(self) -> float:
        """From the start of F(0) to the end of B(S-1), the least."""
        return self.down[-1] + self.stages[-1].f + self.stages[-1].b

    def first(self, rank: int) -> int:
        """The stage of a rank's first F, and of its last B."""
        return self.owned[rank][0]

    def last(self, rank: int) -> int:
        """The stage of a rank's first B, and of its last F."""
        return self.owned[rank][-1]

    def work(self, rank: int) -> float:
        return self.num_microbatches * sum(self.stages[stage].work for stage in self.owned[rank])

    def alike(self, rank: int) -> bool:
        """Whether all stages of a rank cost the same: then its actions are merely counted."""
        return len({self.stages[stage] for stage in self.owned[rank]}) == 1

    def until_first_b(self, rank: int) -> float:
        """From the start of a rank's first F to the start of its first B, the least."""
        low, high = self.first(rank), self.last(rank)
        return self.turn - self.down[low] + self.up[-1] - self.up[high] - self.stages[high].b

    def after_last_f(self, rank: int) -> float:
        """From the end of a rank's last F to the end of its last B, the least."""
        low, high = self.first(rank), self.last(rank)
        return self.turn - self.down[high] - self.stages[high].f + self.up[-1] - self.up[low]


def _terms(costs: Costs, num_stages: int, splits: bool) -> list[StageTerms]:
    time, _, memory = costs.per_stage(num_stages)
    terms = []
    for stage in range(num_stages):
        f, b, w, whole = (time[op][stage] for op in (Op.F, Op.B, Op.W, Op.BW))
        saved, deferred = memory[Op.F][stage], -memory[Op.W][stage]
        if splits:
            b, w = min(b, whole), max(0.0, min(w, whole - b))
        else:
            b, w, deferred = whole, 0.0, 0.0
        terms.append(StageTerms(f, b, w, saved, min(deferred, saved)))
    return terms

"""The relaxation of a problem, which the bounds are about: no action is longer, nothing is held longer.

A bound must hold for plans that split every backward, none, or some. One relaxation covers them all: each
backward is a B of `min(b, bw)` and a W of the rest of `min(b + w, bw)`. Any plan becomes a plan of the
relaxation: shorten each action at its end, and cut a BW into B and W. No span gets longer by that.
Its memory is nowhere higher, either, provided that what is held after B counts as `min(deferred, saved)`.

F's and B's of one unit follow each other through all stages, with a message wherever the rank changes:

    F(0) -> F(1) -> ... -> F(last) -> B(last) -> ... -> B(1) -> B(0)

This chain comes from the data-flow table, see `earliest_starts`. Since it is one chain, two of its actions
start at least as far apart as their earliest starts are.

**Slices.** Give the j-th B and the j-th W of each stage to unit j. The plan is then one without slices, for
as many microbatches as there are units: what B needs, F of all slices of the microbatch, has run before the
first of these B's. So every bound without slices holds. Slices add two waits. Some stage runs F of all S
slices between the rank's first F and its first B, which is that of slice S - 1. And some stage runs B of all
S slices between the rank's last F, that of slice S - 1, and its last B, that of slice 0.

With exchanges a W may take no time at its place, because it has run in exchanges before
(zbpp/schedule/interpret/exchange.py). So the relaxation's W's take none, on every rank with exchanges. Only
the W of a rank's last B runs in no exchange: `w_end` and `work` count it whole. `work` also counts what all
exchanges of the rank together can't hide.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from zbpp.planning.dependencies import earliest_starts
from zbpp.planning.options import MAKESPAN
from zbpp.planning.problem import Problem
from zbpp.schedule.dataflow_arrays import kind_of
from zbpp.schedule.timetable import Op


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


class Relaxation:
    """A problem of units that are alike, with relaxed costs.

    Lists by stage: f_start, b_end and so on: when F, B and W of a lone unit start or end (ms).
    slice_f, slice_b: the time (ms) of F, or B, of all slices of a microbatch but one.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.whole = [_terms(problem, stage) for stage in range(problem.num_stages)]
        self.stages = [
            terms if not self._exchanges(rank) else terms._replace(w=0.0)
            for terms, rank in zip(self.whole, problem.rank_of, strict=True)
        ]
        duration = [time for stage in self.stages for time in (stage.f, stage.b, stage.w, stage.b + stage.w)]
        starts = earliest_starts(problem.num_stages, duration, problem.first_message)
        self.f_start, self.b_start, self.w_start = (
            [starts[kind_of(stage, op)] for stage in range(problem.num_stages)] for op in (Op.F, Op.B, Op.W)
        )
        self.f_end = [start + stage.f for start, stage in zip(self.f_start, self.stages, strict=True)]
        self.b_end = [start + stage.b for start, stage in zip(self.b_start, self.stages, strict=True)]
        self.w_end = [
            start + (self.whole if stage == self.lowest(rank) else self.stages)[stage].w
            for stage, (start, rank) in enumerate(zip(self.w_start, problem.rank_of, strict=True))
        ]
        others = problem.num_slices - 1
        self.slice_f = [others * stage.f for stage in self.stages]
        self.slice_b = [others * stage.b for stage in self.stages]

    def _exchanges(self, rank: int) -> bool:
        return any(self.problem.unit_costs.exchange[stage] > 0 for stage in self.problem.stages_of[rank])

    def stages_on(self, rank: int) -> list[StageTerms]:
        return [self.stages[stage] for stage in self.problem.stages_of[rank]]

    def lowest(self, rank: int) -> int:
        """The stage of a rank's first F, and of its last B."""
        return self.problem.stages_of[rank][0]

    def highest(self, rank: int) -> int:
        """The stage of a rank's first B, and of its last F."""
        return self.problem.stages_of[rank][-1]

    def first_f(self, rank: int) -> float:
        """The least time (ms) from the start of stage 0's first F to the start of a rank's first F."""
        return self.f_start[self.lowest(rank)]

    def work(self, rank: int) -> float:
        """The least time (ms) of all actions of a rank."""
        return self.problem.num_units * sum(stage.work for stage in self.stages_on(rank))

    def work_with_exchanges(self, rank: int) -> float:
        """The least time (ms) of all actions of a rank, W's included that its exchanges can't hide.

        Nothing is pending in the exchanges up to the rank's first B. No exchange hides the W of its last B.
        """
        number, stages = self.problem.num_units, self.problem.stages_of[rank]
        exchange = self.problem.unit_costs.exchange
        up_to_first_b = sum(exchange[stage] for stage in stages) + exchange[self.highest(rank)]
        hides = 2 * number * sum(exchange[stage] for stage in stages) - up_to_first_b
        weights = number * sum(self.whole[stage].w for stage in stages)
        forward_and_back = number * sum(self.whole[stage].f + self.whole[stage].b for stage in stages)
        return forward_and_back + max(self.whole[self.lowest(rank)].w, weights - hides)

    def until_first_b(self, rank: int) -> float:
        """The least time (ms) from the start of a rank's first F to the start of its first B."""
        lowest = self.lowest(rank)
        return self.b_start[self.highest(rank)] - self.f_start[lowest] + max(self.slice_f[lowest:])

    def first_b(self, rank: int) -> float:
        """The least time (ms) from the start of stage 0's first F to the start of a rank's first B."""
        return self.b_start[self.highest(rank)] + max(self.slice_f)

    def after_last_f(self, rank: int) -> float:
        """The least time (ms) from the end of a rank's last F to the end of its last B."""
        lowest = self.lowest(rank)
        return self.b_end[lowest] - self.f_end[self.highest(rank)] + max(self.slice_b[lowest:])

    def round_trip(self, stage: int) -> float:
        """The least time (ms) from the start of a stage's F to the end of its B of the same unit."""
        return self.b_end[stage] - self.f_start[stage]

    def mean_round_trip(self, stage: int) -> float:
        """The least mean over all units: slice k waits for the F's and the B's of later slices, too."""
        return self.round_trip(stage) + (self.slice_f[stage] + self.slice_b[stage]) / 2


def _terms(problem: Problem, stage: int) -> StageTerms:
    time, memory = problem.unit_costs.duration, problem.unit_costs.memory
    f, b, w, whole = (time[op][stage] for op in (Op.F, Op.B, Op.W, Op.BW))
    saved, deferred = memory[Op.F][stage], -memory[Op.W][stage]
    b = min(b, whole)
    return StageTerms(f, b, max(0.0, min(w, whole - b)), saved, min(deferred, saved))


def after_last_b(relaxation: Relaxation, objective: str) -> list[float]:
    """Per rank, the time X (ms) that must pass from the end of its last B to the end of the clock.

    Rank r's last B is that of the last unit of B's on r's lowest stage s. That unit's B's follow on
    s-1, ..., 0. Each stage j <= s ends with a W, so for the makespan

        X = max over j <= s of (from the end of B(s) to the end of W(j))

    For the span, stage j belongs to some rank i, whose span counts from its own first F. That F starts before
    r's first F, and the time between the two counts for X, too. (If j = s, i is r itself, and X is the time
    of its last W.) Whichever j attains the maximum, the bound on r's work and idle time, plus X, is no
    more than the span of rank i, and so no more than the largest span.
    """
    problem = relaxation.problem
    latest, follows = -math.inf, [0.0] * problem.num_ranks
    for stage, rank in enumerate(problem.rank_of):
        clock = 0.0 if objective == MAKESPAN else relaxation.first_f(rank)
        latest = max(latest, relaxation.w_end[stage] - clock)
        if stage == relaxation.lowest(rank):
            follows[rank] = max(0.0, latest - (relaxation.b_end[stage] - clock))
    return follows

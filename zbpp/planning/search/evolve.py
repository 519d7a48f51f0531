"""Which priority rules suit these costs: a small population of them, mutated and selected."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from zbpp.planning.dependencies import earliest_starts
from zbpp.planning.problem import Problem
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.list_scheduling import PriorityRules, list_schedule
from zbpp.schedule.dataflow_arrays import kind_of
from zbpp.schedule.timetable import Op

_PATIENCE = (0.0, 0.1, 0.3, 0.6, 1.0)
_IDLE_SHARE = (0.0, 0.3, 0.6, 0.8, 1.0, 1.2, 2.0)
_POPULATION = 8
_MOST_EQUAL = 3  # candidates of one objective: they are mostly the same plan


class Candidate(NamedTuple):
    """Rules, the objective of the plan that they give, and per rank the kinds of that plan in order."""

    value: float
    born: int
    rules: PriorityRules
    kinds: list[list[int]]


class Population:
    """The best rules so far, best first; of equals the youngest first, so that the population drifts."""

    def __init__(self, problem: Problem, target: float, rng: random.Random) -> None:
        self.problem, self.rng = problem, rng
        self.spare_times = spare_times(problem, target)
        self.candidates: list[Candidate] = []
        self.num_born = 0
        self._first = first_rules(problem)

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def advance(self, num_runs: int, deadline: Deadline, goal: float) -> None:
        """Try rules for so many runs: the fixed ones first, then children."""
        for _ in range(num_runs):
            if deadline.over or (self.candidates and self.best.value <= goal):
                return
            first = next(self._first, None)
            self._try(self._child() if first is None else first)

    def _child(self) -> PriorityRules:
        parent = min(int(self.rng.expovariate(0.5)), len(self.candidates) - 1)
        return _mutated(self.candidates[parent].rules, self.rng)

    def _try(self, rules: PriorityRules) -> None:
        value, kinds = list_schedule(self.problem, self.spare_times, rules)
        self.num_born += 1
        if self.candidates and value == math.inf:
            return
        candidates = self.candidates
        candidates.append(Candidate(value, self.num_born, rules, kinds))
        candidates.sort(key=lambda each: (each.value, -each.born))
        equal = [each for each in candidates if abs(each.value - value) <= self.problem.tolerance]
        if len(equal) > _MOST_EQUAL:
            candidates.remove(equal[-1])
        del candidates[_POPULATION:]


def spare_times(problem: Problem, target: float) -> list[float]:
    """Per rank, how long it may wait and still meet the target (ms).

    That is the target less the rank's start, its work, and the idle time at its end.
    """
    times, number = problem.stage_costs.duration, problem.num_microbatches
    starts = earliest_starts(problem.num_stages, problem.duration, problem.message)
    spare = []
    for rank in range(problem.num_ranks):
        time_f, time_b, time_w = (times[op][rank] for op in (Op.F, Op.B, Op.W))
        work = number * (time_f + time_b + time_w)
        begin = problem.fill[rank] - problem.offsets[rank]
        down_and_back = starts[kind_of(rank, Op.B)] - starts[kind_of(rank, Op.F)] - time_f
        idle_tail = max(0.0, down_and_back - _work_in_flight(problem, rank))
        spare.append(max(0.0, target - begin - work - idle_tail))
    return spare


def _work_in_flight(problem: Problem, rank: int) -> float:
    """The most work (ms) that a rank may have left between its last F and its last B, as memory allows.

    When the last F ends, `a` microbatches wait for B. Before the last of their B's the rank can run the other
    a - 1 with their W's, and the W's of `x` more microbatches.
    """
    times, memory, number = problem.stage_costs.duration, problem.stage_costs.memory, problem.num_microbatches
    time_b, time_w = times[Op.B][rank], times[Op.W][rank]
    saved, deferred, limit = memory[Op.F][rank], -memory[Op.W][rank], problem.ceilings[rank]
    most = 0.0
    for a in range(1, number + 1):
        if a * saved > limit:
            break
        x = number - a if deferred <= 0 or limit == math.inf else int((limit - a * saved) / deferred)
        x = min(x, number - a)
        most = max(most, (a - 1) * (time_b + time_w) + x * time_w)
    return most


def first_rules(problem: Problem) -> Iterator[PriorityRules]:
    """A set of rules per patience, in which every rank may use all of its spare time."""
    for patience in _PATIENCE:
        yield PriorityRules(patience, [1.0] * problem.num_ranks)


def _mutated(rules: PriorityRules, rng: random.Random) -> PriorityRules:
    """One to three changes; each gives neighbouring ranks the same share of their spare time."""
    shares = list(rules.idle_shares)
    for _ in range(rng.choice((1, 1, 2, 3))):
        share = rng.choice(_IDLE_SHARE)
        for rank in _neighbours(len(shares), rng):
            shares[rank] = share
    return PriorityRules(rules.patience, shares)


def _neighbours(num_ranks: int, rng: random.Random) -> range:
    """One rank, all from one on, or some in a row."""
    first = rng.randrange(num_ranks)
    return range(first, rng.choice((first + 1, first + 1, num_ranks, rng.randint(first + 1, num_ranks))))

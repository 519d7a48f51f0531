"""Which priority rules suit these costs: a small population of settings, mutated and selected."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import NamedTuple

from zbpp.planning.earliest_starts import earliest_starts
from zbpp.planning.problem import Problem
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.list_scheduling import PriorityRule, Settings, list_schedule
from zbpp.schedule.dataflow_arrays import kind_of
from zbpp.schedule.timetable import Op

_PATIENCE = (0.0, 0.1, 0.3, 0.6, 1.0)
_IDLE_SHARE = (0.0, 0.3, 0.6, 0.8, 1.0, 1.2, 2.0)
_STEPS = (-2, -1, 1, 2)  # of whole numbers
_RULES = tuple(field.name for field in fields(PriorityRule))
_POPULATION = 8
_MOST_EQUAL = 3  # candidates of one objective: they are mostly the same plan


class Candidate(NamedTuple):
    """Settings, the objective of the plan that they give, and per rank the kinds of that plan in order."""

    value: float
    born: int
    settings: Settings
    kinds: list[list[int]]


class Population:
    """The best settings so far, best first; of equals the youngest first, so that the population drifts."""

    def __init__(self, problem: Problem, target: float, rng: random.Random) -> None:
        self.problem, self.rng = problem, rng
        self.spare_times = spare_times(problem, target)
        self.candidates: list[Candidate] = []
        self.num_born = 0
        self._first = first_settings(problem)

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def advance(self, num_runs: int, deadline: Deadline, goal: float) -> None:
        """Try so many settings: the fixed ones first, then children."""
        for _ in range(num_runs):
            if deadline.over or (self.candidates and self.best.value <= goal):
                return
            self._try(next(self._first, None) or self._child())

    def _child(self) -> Settings:
        parent = min(int(self.rng.expovariate(0.5)), len(self.candidates) - 1)
        return _mutated(self.candidates[parent].settings, self.rng)

    def _try(self, settings: Settings) -> None:
        value, kinds = list_schedule(self.problem, self.spare_times, settings)
        self.num_born += 1
        if self.candidates and value == math.inf:
            return
        candidates = self.candidates
        candidates.append(Candidate(value, self.num_born, settings, kinds))
        candidates.sort(key=lambda each: (each.value, -each.born))
        equal = [each for each in candidates if abs(each.value - value) <= self.problem.tolerance]
        if len(equal) > _MOST_EQUAL:
            candidates.remove(equal[-1])
        del candidates[_POPULATION:]


def spare_times(problem: Problem, target: float) -> list[float]:
    """Per rank, how long it may wait if it is to meet the target (ms): without its work and its idle tail."""
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

    `a` microbatches wait for B and W, one of them for the last B; `x` wait for W alone.
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


def first_settings(problem: Problem) -> Iterator[Settings]:
    """The same rule for all ranks, in all variants, with the cap at which F's and B's meet halfway."""
    late_from = [_late_from(problem, rank) for rank in range(problem.num_ranks)]
    caps = [2 * (problem.num_ranks - rank) - 1 for rank in range(problem.num_ranks)]
    either = (True, False)
    variants = itertools.product(either, either, either, _PATIENCE)
    for forward_first, strict_cap, free_memory, patience in variants:
        if strict_cap and not forward_first:
            continue
        rules = [
            PriorityRule(forward_first, cap, strict_cap, free_memory, patience, idle_share=1.0, fuse=pays)
            for cap, pays in zip(caps, problem.whole_pays, strict=True)
        ]
        yield Settings(rules, rules, late_from)


def _late_from(problem: Problem, rank: int) -> int:
    """F's from here on may still be in flight when the last F has run."""
    saved, limit = problem.stage_costs.memory[Op.F][rank], problem.limits[rank]
    held = limit / saved if saved > 0 else math.inf
    return max(0, problem.num_microbatches - int(min(held, problem.num_microbatches)))


def _mutated(settings: Settings, rng: random.Random) -> Settings:
    """One to three changes, each the same one on neighbouring ranks."""
    early, late, late_from = list(settings.early), list(settings.late), list(settings.late_from)
    for _ in range(rng.choice((1, 1, 2, 3))):
        ranks = _neighbours(len(late_from), rng)
        changed = rng.choice(("early", "late", "both", "late_from"))
        if changed == "late_from":
            step = rng.choice(_STEPS)
            for rank in ranks:
                late_from[rank] = max(0, late_from[rank] + step)
            continue
        name, draw = rng.choice(_RULES), rng.random()
        for rank in ranks:
            if changed in ("early", "both"):
                early[rank] = _changed(early[rank], name, draw)
            if changed in ("late", "both"):
                late[rank] = _changed(late[rank], name, draw)
    return Settings(early, late, late_from)


def _neighbours(num_ranks: int, rng: random.Random) -> range:
    """One rank, all from one on, or some in a row."""
    first = rng.randrange(num_ranks)
    return range(first, rng.choice((first + 1, first + 1, num_ranks, rng.randint(first + 1, num_ranks))))


def _changed(rule: PriorityRule, name: str, draw: float) -> PriorityRule:
    """The rule with one value drawn anew; draw: from 0 to 1, the same for ranks that change alike."""
    match name:
        case "cap":
            return replace(rule, cap=max(1, rule.cap + _STEPS[int(draw * len(_STEPS))]))
        case "patience":
            return replace(rule, patience=_PATIENCE[int(draw * len(_PATIENCE))])
        case "idle_share":
            return replace(rule, idle_share=_IDLE_SHARE[int(draw * len(_IDLE_SHARE))])
        case _:
            return replace(rule, **{name: not getattr(rule, name)})

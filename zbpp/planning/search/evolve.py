"""Which knobs suit these costs: a small population of settings for `aimed_plan`, mutated and selected."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from zbpp.planning.problem import Problem
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.list_scheduling import Knobs, aimed_plan
from zbpp.schedule.timetable import Op

_PATIENCE = (0.0, 0.1, 0.3, 0.6, 1.0)
_BUDGET = (0.0, 0.3, 0.6, 0.8, 1.0, 1.2, 2.0)
_NAMES = ("forward", "cap", "strict", "frees", "patience", "budget", "whole")
_POPULATION = 8
_ALIKE = 3  # most members of one objective: they are mostly the same plan


class Genes(NamedTuple):
    """Settings of all ranks: for the first F's, for the late ones, and where those begin."""

    early: list[Knobs]
    late: list[Knobs]
    turn: list[int]


class Member(NamedTuple):
    value: float
    born: int
    genes: Genes
    words: list[list[int]]


class Population:
    """The best settings so far, best first; of equals the youngest first, so that they drift."""

    def __init__(self, problem: Problem, target: float, rng: random.Random) -> None:
        self.problem, self.rng = problem, rng
        self.spare = spare_times(problem, target)
        self.members: list[Member] = []
        self.born = 0
        self._first = _presets(problem)

    @property
    def best(self) -> Member:
        return self.members[0]

    def advance(self, runs: int, deadline: Deadline, goal: float) -> None:
        """So many runs: the presets first, then children."""
        for _ in range(runs):
            if deadline.over or (self.members and self.best.value <= goal):
                return
            self._try(next(self._first, None) or self._child())

    def _child(self) -> Genes:
        parent = min(int(self.rng.expovariate(0.5)), len(self.members) - 1)
        return _mutated(self.members[parent].genes, self.rng)

    def _try(self, genes: Genes) -> None:
        value, words = aimed_plan(self.problem, self.spare, *genes)
        self.born += 1
        if self.members and value == math.inf:
            return
        members = self.members
        members.append(Member(value, self.born, genes, words))
        members.sort(key=lambda member: (member.value, -member.born))
        alike = [each for each in members if abs(each.value - value) <= self.problem.tolerance]
        if len(alike) > _ALIKE:
            members.remove(alike[-1])
        del members[_POPULATION:]


def spare_times(problem: Problem, target: float) -> list[float]:
    """Per rank, how long it may wait if it is to meet a target: less its work and its idle tail."""
    times, number = problem.stage_costs.duration, problem.num_microbatches
    spare = []
    for rank in range(problem.num_ranks):
        work = number * (times[Op.F][rank] + times[Op.B][rank] + times[Op.W][rank])
        begin = problem.fill[rank] - problem.offsets[rank]
        spare.append(max(0.0, target - begin - work - _idle_tail(problem, rank)))
    return spare


def _idle_tail(problem: Problem, rank: int) -> float:
    """The least wait between a rank's last F and last B: the way down and back, less what can fill it.

    That is what is in flight then, a microbatches with B and W to run and x with W alone, as far as
    memory can hold them.
    """
    times, memory, number = problem.stage_costs.duration, problem.stage_costs.memory, problem.num_microbatches
    way = sum(problem.latency[rank:]) + sum(problem.backward_latency[rank:])
    way += sum(times[op][below] for op in (Op.F, Op.B) for below in range(rank + 1, problem.num_ranks))
    saved, deferred, limit = memory[Op.F][rank], -memory[Op.W][rank], problem.ceilings[rank]
    most = 0.0
    for a in range(1, number + 1):
        if a * saved > limit:
            break
        x = number - a if deferred <= 0 or limit == math.inf else int((limit - a * saved) / deferred)
        x = min(x, number - a)
        most = max(most, (a - 1) * (times[Op.B][rank] + times[Op.W][rank]) + x * times[Op.W][rank])
    return max(0.0, way - most)


def _presets(problem: Problem) -> Iterator[Genes]:
    """The same for all ranks, each way: with the cap at which F's and B's meet halfway."""
    turn = [_late_from(problem, rank) for rank in range(problem.num_ranks)]
    caps = [2 * (problem.num_ranks - rank) - 1 for rank in range(problem.num_ranks)]
    flags = (True, False)
    for forward, strict, frees, patience in itertools.product(flags, flags, flags, _PATIENCE):
        if forward or not strict:
            knobs = [
                Knobs(forward, cap, strict, frees, patience, 1.0, pays)
                for cap, pays in zip(caps, problem.whole_pays, strict=True)
            ]
            yield Genes(knobs, knobs, turn)


def _late_from(problem: Problem, rank: int) -> int:
    """F's from here on are still in flight when the last one is done."""
    saved, limit = problem.stage_costs.memory[Op.F][rank], problem.limits[rank]
    held = limit / saved if saved > 0 else math.inf
    return max(0, problem.num_microbatches - int(min(held, problem.num_microbatches)))


def _mutated(genes: Genes, rng: random.Random) -> Genes:
    """One to three changes, each the same one on a stretch of neighbouring ranks."""
    early, late, turn = list(genes.early), list(genes.late), list(genes.turn)
    ranks = len(turn)
    for _ in range(rng.choice((1, 1, 2, 3))):
        first = rng.randrange(ranks)
        stretch = range(first, rng.choice((first + 1, first + 1, ranks, rng.randint(first + 1, ranks))))
        what = rng.choice(("early", "late", "both", "turn"))
        if what == "turn":
            step = rng.choice((-2, -1, 1, 2))
            for rank in stretch:
                turn[rank] = max(0, turn[rank] + step)
            continue
        name, draw = rng.choice(_NAMES), rng.random()
        for knobs in [early] * (what != "late") + [late] * (what != "early"):
            for rank in stretch:
                knobs[rank] = _changed(knobs[rank], name, draw)
    return Genes(early, late, turn)


def _changed(knobs: Knobs, name: str, draw: float) -> Knobs:
    match name:
        case "cap":
            return replace(knobs, cap=max(1, knobs.cap + (-2, -1, 1, 2)[int(draw * 4)]))
        case "patience":
            return replace(knobs, patience=_PATIENCE[int(draw * len(_PATIENCE))])
        case "budget":
            return replace(knobs, budget=_BUDGET[int(draw * len(_BUDGET))])
        case _:
            return replace(knobs, **{name: not getattr(knobs, name)})

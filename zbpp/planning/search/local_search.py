"""The search as a whole: a pool of plans, improved round by round until the bound or the time is reached."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from zbpp.planning.bounds import bound_of
from zbpp.planning.problem import Plan, Problem
from zbpp.planning.search.anneal import anneal
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.evolve import Population
from zbpp.planning.search.fuse_backward import join
from zbpp.planning.search.incremental_timing import Board
from zbpp.planning.search.initial_orders import fitting, starts
from zbpp.planning.search.justify import justify
from zbpp.planning.search.repeat_steady_state import stretched

Progress = Callable[[float, float, float], None]

_POOL = 6  # plans that are worked on
_PLACED = 400_000  # actions placed by list scheduling in a round,
_MOVES = 4000  # and moves of annealing
_WARMTH = (0.0, 0.02, 0.1, 0.3)  # of annealing, in average action times,
_SMALL = 200  # actions: a smaller board is gone through so often that it bears more
_STALE = 8  # rounds without a better setting: a population begins anew
_SHARE = 0.3  # of the time, at most, for what the search starts from
_FEW = 3  # microbatches per rank: enough for a steady part
_QUIET = 80  # rounds without a better plan: give up


class Hunt:
    """A pool of plans, best first, and what improves them.

    A round takes one plan of the pool, the best most often, anneals and justifies it, and puts the
    result back. With one stage per rank it also lets a population of list schedulers advance.
    """

    def __init__(
        self, problem: Problem, deadline: Deadline, seed: int, progress: Progress | None = None
    ) -> None:
        self.problem, self.deadline, self.progress, self.seed = problem, deadline, progress, seed
        if progress:
            deadline.watch = self._report
        self.bound = bound_of(problem).value
        self.goal = self.bound + problem.tolerance
        self.rng = random.Random(seed)
        self.pool: list[tuple[float, Plan]] = []
        self.pause = sum(problem.duration) / len(problem.duration)
        self.evolves = problem.placement == "one"
        self.population: Population | None = None
        self.stale = 0

    @property
    def best(self) -> float:
        return self.pool[0][0]

    def run(self) -> Plan:
        """The best plan found; never worse than the best family that fits."""
        for value, plan in fitting(self.problem):
            self._offer(value, plan)
        if self.evolves and not self._finished:
            self._evolve()
        self._justify_starts()
        if not self.evolves and not self._finished:
            self._stretch()
        quiet = 0
        while not self._finished and quiet < _QUIET:
            before = self.best
            self._round()
            quiet = 0 if self.best < before - self.problem.tolerance else quiet + 1
        if self.progress:
            self.progress(1.0, self.best, self.bound)
        return self.pool[0][1]

    @property
    def _finished(self) -> bool:
        return self.best <= self.goal or self.deadline.over

    def _report(self) -> None:
        if self.progress:
            self.progress(self.deadline.fraction, self.best, self.bound)

    def _offer(self, value: float, plan: Plan) -> None:
        """Into the pool; of plans with equal objective the newest stays, so that the pool drifts."""
        tolerance = self.problem.tolerance
        self.pool = [each for each in self.pool if abs(each[0] - value) > tolerance]
        self.pool.append((value, plan))
        self.pool.sort(key=lambda each: each[0])
        del self.pool[_POOL:]

    def _justify_starts(self) -> None:
        for plan in self._starts():
            if self._finished or self.deadline.fraction > _SHARE:
                return
            self._settle(Board(self.problem, plan))

    def _settle(self, board: Board) -> None:
        """What costs little and never hurts; then into the pool."""
        join(board, self.deadline)
        justify(board, self.deadline)
        self._offer(board.value, board.rows)

    def _starts(self) -> Iterator[Plan]:
        yield from [plan for _, plan in self.pool]
        yield from starts(self.problem, self.deadline)

    def _stretch(self) -> None:
        """Plans for fewer microbatches, found in half of the time left, with their middle repeated."""
        few = _FEW * self.problem.num_ranks
        if self.problem.num_microbatches <= few + self.problem.num_ranks:
            return
        small = self.problem.with_microbatches(few)
        hunt = Hunt(small, self.deadline.part(0.5), self.seed)
        hunt.run()
        for _, plan in hunt.pool:
            board = stretched(small, plan, self.problem, self.deadline)
            if board:
                self._settle(board)
            if self._finished:
                return

    def _round(self) -> None:
        if self.evolves:
            self._evolve()
        if self._finished:
            return
        _, plan = self.pool[min(int(self.rng.expovariate(0.7)), len(self.pool) - 1)]
        board = Board(self.problem, plan)
        warmth = self.rng.choice(_WARMTH) * self.pause * max(1.0, _SMALL / len(board.order))
        anneal(board, self.rng, _MOVES, warmth, self.deadline, self.goal)
        self._settle(board)

    def _evolve(self) -> None:
        if self.population is None or self.stale >= _STALE:
            self.population, self.stale = Population(self.problem, self.bound, self.rng), 0
        population = self.population
        before = population.members[0].value if population.members else float("inf")
        runs = _PLACED // (3 * self.problem.num_stages * self.problem.num_microbatches)
        population.advance(max(runs, 10), self.deadline, self.goal)
        if not population.members:
            return
        best = population.best
        if best.value < before - self.problem.tolerance:
            self.stale = 0
            self._settle(Board(self.problem, self.problem.numbered(best.words)))
        else:
            self.stale += 1

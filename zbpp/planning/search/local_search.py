"""`zb_auto`: a pool of plans, improved round by round until the bound or the time is reached."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from zbpp.planning.bounds import bound_of
from zbpp.planning.memory_limit import MemoryLimit
from zbpp.planning.placement import place_stages
from zbpp.planning.problem import Plan, Problem
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.improve import justify, move_at_random
from zbpp.planning.search.incremental_timing import IncrementalTiming
from zbpp.planning.search.initial_orders import initial_plans, rebuilt_plans
from zbpp.planning.search.list_scheduling import Population
from zbpp.planning.search.paper_planner import paper_plan
from zbpp.schedule.costs import Costs
from zbpp.schedule.timetable import PlanError, Timetable

Progress = Callable[[float, float, float], None]

_POOL = 6  # plans that are worked on
_SCHEDULED = 40_000  # actions placed by list scheduling in a round
_MOVES = 4000  # at random in a round
_MOST_STALE = 8  # rounds of list scheduling without a better setting, then a new population
_SHARE_OF_STARTS = 0.3  # of the time, at most, for improving what the search starts from
_MOST_QUIET = 80  # rounds without a better plan, then the search ends
_NEAR_BOUND = 0.02  # a gap to the bound


class LocalSearch:
    """A pool of plans, best first, and what improves them.

    A round takes a plan of the pool, the best one most often, moves actions at random, justifies it, and
    puts the result back. With one stage per rank it also lets a population of list schedulers advance.

    most_quiet_near_bound: rounds without a better plan after which the search ends within 2 % of the bound.
    """

    def __init__(
        self,
        problem: Problem,
        deadline: Deadline,
        seed: int,
        progress: Progress | None = None,
        most_quiet_near_bound: int = _MOST_QUIET,
    ) -> None:
        self.problem, self.deadline, self.progress, self.seed = problem, deadline, progress, seed
        if progress:
            deadline.watch = self._report
        self.most_quiet_near_bound = most_quiet_near_bound
        self.bound = bound_of(problem).value - problem.last_reduction
        self.goal = self.bound + problem.tolerance
        self.rng = random.Random(seed)
        self.pool: list[tuple[float, Plan]] = []
        self.uses_list_scheduling = problem.placement == "one"
        self.population: Population | None = None
        self.num_stale = 0

    @property
    def best(self) -> float:
        """The objective (ms) of the best plan so far, without reductions."""
        return self.pool[0][0]

    def run(self) -> Plan:
        """The best plan found; never worse than the best family that fits."""
        for value, plan in initial_plans(self.problem):
            self._add(value, plan)
        if self.uses_list_scheduling and not self._finished:
            self._schedule_lists()
        self._improve_starts()
        num_quiet = 0
        while not self._finished and num_quiet < self._most_quiet:
            before = self.best
            self._round()
            num_quiet = 0 if self.best < before - self.problem.tolerance else num_quiet + 1
        if self.progress:
            self.progress(1.0, self.best, self.bound)
        return self.pool[0][1]

    @property
    def _most_quiet(self) -> int:
        is_near = self.best <= self.bound * (1 + _NEAR_BOUND)
        return self.most_quiet_near_bound if is_near else _MOST_QUIET

    @property
    def _finished(self) -> bool:
        return self.best <= self.goal or self.deadline.over

    def _report(self) -> None:
        if self.progress:
            self.progress(self.deadline.fraction, self.best, self.bound)

    def _add(self, value: float, plan: Plan) -> None:
        """Add a plan to the pool. It replaces plans with an equal objective, so that the pool drifts."""
        tolerance = self.problem.tolerance
        self.pool = [each for each in self.pool if abs(each[0] - value) > tolerance]
        self.pool.append((value, plan))
        self.pool.sort(key=lambda each: each[0])
        del self.pool[_POOL:]

    def _improve(self, timing: IncrementalTiming) -> None:
        """Improve a plan by what costs little and never makes it longer; then add it to the pool."""
        justify(timing, self.deadline)
        # With exchanges a move changes what other W's hide, and where links are occupied, how long messages
        # wait: the timing does not follow.
        is_exact = not self.problem.has_exchange and not self.problem.has_queues
        self._add(timing.value if is_exact else self.problem.value_of_plan(timing.rows), timing.rows)

    def _improve_starts(self) -> None:
        for plan in self._starts():
            if self._finished or self.deadline.fraction > _SHARE_OF_STARTS:
                return
            self._improve(IncrementalTiming(self.problem, plan))

    def _starts(self) -> Iterator[Plan]:
        yield from [plan for _, plan in self.pool]
        yield from rebuilt_plans(self.problem, self.deadline)

    def _round(self) -> None:
        if self.uses_list_scheduling:
            self._schedule_lists()
        if self._finished:
            return
        _, plan = self.pool[min(int(self.rng.expovariate(0.7)), len(self.pool) - 1)]
        timing = IncrementalTiming(self.problem, plan)
        move_at_random(timing, self.rng, _MOVES, self.deadline, self.goal)
        self._improve(timing)

    def _schedule_lists(self) -> None:
        """Let the population of list schedulers advance; improve its best plan if that is a new one."""
        if self.population is None or self.num_stale >= _MOST_STALE:
            self.population, self.num_stale = Population(self.problem, self.bound, self.rng), 0
        population = self.population
        before = population.best.value if population.candidates else math.inf
        num_runs = _SCHEDULED // (3 * self.problem.num_stages * self.problem.num_units)
        population.advance(max(num_runs, 10), self.deadline, self.goal)
        if not population.candidates:
            return
        best = population.best
        if best.value < before - self.problem.tolerance:
            self.num_stale = 0
            self._improve(IncrementalTiming(self.problem, self.problem.numbered(best.kinds)))
        else:
            self.num_stale += 1


def zb_auto(
    num_ranks: int,
    num_microbatches: int,
    *,
    num_slices: int = 1,
    costs: Costs = Costs(),
    memory_limit: MemoryLimit = None,
    placement: str | None = None,
    stages_per_rank: int | None = None,
    objective: str = "makespan",
    search: bool = True,
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Timetable:
    """The best timetable found within `time_limit` (s) for the given costs and memory limit.

    placement: "one" (None), "v" or "looped" (stages_per_rank stages, None: 2).
    memory_limit: in the unit of costs.saved, one number for all ranks, or a list with one per rank;
    None: no limit.
    objective: "makespan", or "span", the longest of the ranks' spans.
    Never worse than the best family of this placement that fits, even with a time_limit of 0; stops at
    the lower bound, and when a long stretch of rounds brought nothing. The same arguments and seed
    give the same timetable, unless the time ran out.
    Reductions (costs.reduce) do not count: they come after all actions of a stage.
    Backwards are split: the runtime's BW is B followed at once by its W. Only a family's plan that nothing
    improves, or a rank without memory for a B, has whole ones.
    progress(share of time_limit that is spent, best objective so far in ms, lower bound in ms) is called
    about ten times a second, and at the end with a share of 1.

    search=False: the planner of Zero Bubble (arXiv:2401.10241, section 3.1) and nothing else; one
    stage per rank, smallest max span. Without a memory limit each rank runs as many F's as there is
    time for before its first B can arrive, no more, so its memory ends near 2p.

    Raises PlanError for a limit that can't hold one microbatch (with the least that works, per
    rank), for arguments out of range, and for a placement that contradicts stages_per_rank or, with
    search=False, is not "one".
    """
    rank_of = place_stages(num_ranks, placement or "one", stages_per_rank)
    problem = Problem(rank_of, num_microbatches, costs, memory_limit, objective, num_slices)
    if search:
        return problem.timetable_of(LocalSearch(problem, Deadline(time_limit), seed, progress).run())
    if problem.placement != "one":
        raise PlanError(f"the paper's planner (search=False) has one stage per rank, not {placement!r}")
    if num_slices > 1:
        raise PlanError(f"the paper's planner (search=False) has no slices, and num_slices={num_slices}")
    return problem.timetable_of(paper_plan(problem))

"""The question that `choose` answers: counts, costs, memory limit, and the limits and placements to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from zbpp.planning.bounds import Bound, bound_of
from zbpp.planning.memory_limit import MemoryLimit
from zbpp.planning.objective import MAKESPAN, OBJECTIVES
from zbpp.planning.option_ranges import check_range
from zbpp.planning.placement import place_stages
from zbpp.planning.problem import Problem
from zbpp.planning.rank_costs import RankCosts, check_rank_costs
from zbpp.planning.search.paper_planner import memory_of_1f1b
from zbpp.planning.size_limit import BYTES_PER_SEARCHED_ACTION, check_size
from zbpp.planning.variants import KEPT
from zbpp.schedule.costs import Costs
from zbpp.schedule.timetable import PlanError

# The memory sweep: limits in multiples of 1F1B's memory, and the placements that are searched under each.
SWEEP_MULTIPLES = (1.0, 1.25, 1.5, 1.75, 2.0)
SWEEP_PLACEMENTS = ("one", "v")


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """The pipeline that a schedule is to be chosen for.

    costs: for one rank's share of the model. memory_limit: in the unit of costs.saved, one number for all
    ranks, or a list with one per rank. time_limit: seconds of all searches together. kept: the share of
    `saved` that a stage keeps from F until B if it recomputes.
    Raises PlanError for what is out of range, and for a limit that can't hold one microbatch (with the
    least that works).
    """

    num_ranks: int
    num_microbatches: int
    costs: RankCosts = field(default_factory=RankCosts)
    memory_limit: MemoryLimit = None
    objective: str = MAKESPAN
    time_limit: float = 45.0
    seed: int = 0
    kept: float = KEPT

    def __post_init__(self) -> None:
        check_rank_costs(self.costs)
        check_range("memory_limit", self.memory_limit)
        check_range("time_limit", self.time_limit)
        if not 0 <= self.kept <= 1:
            raise PlanError(f"kept={self.kept}: write a share of `saved`, 0 to 1")
        check_size(self.num_ranks, self.num_microbatches, 1, BYTES_PER_SEARCHED_ACTION)
        self.problem("one", self.memory_limit, self.objective)  # refuses what can't be planned

    @property
    def other_objective(self) -> str:
        return next(each for each in OBJECTIVES if each != self.objective)

    @cached_property
    def memory_of_1f1b(self) -> float:
        """num_ranks times the activations of the largest stage (printed as 1.00p).

        1F1B holds as much on rank 0 if all stages are equal, and less if a later stage is the largest.
        """
        return memory_of_1f1b(self.costs_for(self.num_ranks), self.num_ranks)

    @cached_property
    def static(self) -> float:
        """The most that a rank holds all the time, with one stage per rank."""
        return max(self.costs_for(self.num_ranks).per_stage(self.num_ranks).static)

    def multiple(self, number: float) -> float:
        """The memory limit under which microbatches hold so many times 1F1B's activations."""
        return number * self.memory_of_1f1b + self.static

    @cached_property
    def limits(self) -> list[MemoryLimit]:
        """The limits of the memory sweep, ascending; None comes last.

        The given limit is sorted in, or stands first if it is a list with one number per rank.
        """
        sweep = set(map(self.multiple, SWEEP_MULTIPLES))
        if self.memory_limit is None:
            return [*sorted(sweep), None]
        if isinstance(self.memory_limit, Sequence):
            return [self.memory_limit, *sorted(sweep), None]
        return [*sorted(sweep | {float(self.memory_limit)}), None]

    @property
    def span_limits(self) -> list[MemoryLimit]:
        """The limits under which both objectives are tried: the given one, and twice 1F1B's memory."""
        given, twice = self.memory_limit, self.multiple(2)
        return [given] if given == twice else [given, twice]

    def costs_for(self, num_stages: int) -> Costs:
        """The costs per stage of timetables with so many stages."""
        return self.costs.per_stage(num_stages, self.num_ranks)

    def problem(self, placement: str, limit: MemoryLimit, objective: str) -> Problem:
        """The problem for one placement, limit and objective. Raises PlanError."""
        rank_of = place_stages(self.num_ranks, placement)
        return Problem(rank_of, self.num_microbatches, self.costs_for(len(rank_of)), limit, objective)

    def bound(
        self, placement: str, limit: MemoryLimit, objective: str | None = None, splits: bool = True
    ) -> Bound | None:
        """The lower bound (ms); None if no plan fits. splits=False: for plans with whole backwards only."""
        try:
            return bound_of(self.problem(placement, limit, objective or self.objective), splits)
        except PlanError:
            return None

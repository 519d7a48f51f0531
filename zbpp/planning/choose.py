"""Which schedule to use: every family and the search at the same costs, under one memory limit.

`choose` plans for a `PlanningRequest`; its `Answer` ranks the plans, each beside a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

from zbpp.planning.bounds import Bound, bound_of
from zbpp.planning.memory_limit import MemoryLimit, fits, limits_per_rank
from zbpp.planning.options import EQUAL, check_count
from zbpp.planning.placement import place_stages
from zbpp.planning.plan import placement_of, plan, takes_costs
from zbpp.planning.problem import Problem
from zbpp.planning.rank_costs import RankCosts
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.local_search import LocalSearch
from zbpp.planning.slices import balanced_shares
from zbpp.schedule.costs import Costs
from zbpp.schedule.families import FAMILIES
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import PlanError, Timetable

Progress = Callable[[float, str], None]

# The share of the time that is left which each placement's search may take. A search that ends early, at its
# bound, leaves its time to the searches after it. One stage per rank takes the least, a V the most.
_SHARES = {"one": 0.3, "v": 0.6, "looped": 1.0}
_MOST_QUIET = 20  # rounds without a better plan after which a search ends near its bound


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """The pipeline that a schedule is to be chosen for.

    costs: for one rank's share of the model. memory_limit: in the unit of costs.saved, one number for all
    ranks, or a list with one per rank. time_limit: seconds of all searches together.
    slices: the numbers of slices to try. Slices are balanced (slices.py), unless costs have slice_bounds.
    Raises PlanError for what is out of range, and for a limit that can't hold one microbatch (with the
    least that works).
    """

    num_ranks: int
    num_microbatches: int
    costs: RankCosts = field(default_factory=RankCosts)
    memory_limit: MemoryLimit = None
    time_limit: float = 10.0
    seed: int = 0
    slices: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        check_count("num_ranks", self.num_ranks)
        for each in self.slices:
            self.problem("one", each)  # refuses what can't be planned

    @property
    def static(self) -> float:
        """The most that a rank holds all the time, with one stage per rank."""
        return max(self.costs_for(self.num_ranks).per_stage(self.num_ranks).static)

    def costs_for(self, num_stages: int, num_slices: int = 1) -> Costs:
        """The costs per stage of timetables with so many stages and slices."""
        costs = self.costs.per_stage(num_stages, self.num_ranks)
        if num_slices == 1 or costs.slice_bounds:
            return costs
        return costs.sliced(balanced_shares(num_slices, self.costs))

    def problem(self, placement: str, num_slices: int = 1) -> Problem:
        """The problem for one placement. Raises PlanError."""
        return self.problem_of(place_stages(self.num_ranks, placement), self.memory_limit, num_slices)

    def problem_of(self, rank_of: tuple[int, ...], limit: MemoryLimit, num_slices: int = 1) -> Problem:
        """The problem for the stages on these ranks under any limit. Raises PlanError."""
        costs = self.costs_for(len(rank_of), num_slices)
        return Problem(rank_of, self.num_microbatches, costs, limit, num_slices=num_slices)

    def bound(self, placement: str, limit: MemoryLimit) -> Bound | None:
        """The lower bound (ms) for a placement under any limit, with the best number of slices.

        None if no plan fits.
        """
        found: list[Bound] = []
        for num_slices in self.slices:
            with suppress(PlanError):
                rank_of = place_stages(self.num_ranks, placement)
                found.append(bound_of(self.problem_of(rank_of, limit, num_slices)))
        return min(found, key=lambda bound: bound.value, default=None)


@dataclass(frozen=True)
class Candidate:
    """A plan, and the name under which `plan` makes it.

    bound: the lower bound for its placement within the memory limit, on its makespan.
    """

    name: str
    timeline: Timeline
    bound: Bound

    @property
    def placement(self) -> str:
        return placement_of(self.timeline.timetable)

    @property
    def title(self) -> str:
        """What to type after `zbpp plan` for this plan: its name, slices, and for zb_auto its placement."""
        placement = f" --placement {self.placement}" if self.name == "zb_auto" else ""
        slices = f" --slices {self.num_slices}" if self.num_slices > 1 else ""
        return f"{self.name}{placement}{slices}"

    @property
    def num_slices(self) -> int:
        return self.timeline.timetable.num_slices

    @property
    def gap(self) -> float:
        return self.bound.gap(self.timeline.makespan)

    @property
    def proved_optimal(self) -> bool:
        return self.gap <= EQUAL


@dataclass(frozen=True)
class Answer:
    """ranked: the plans that fit the limit, best first. too_large: those that don't, the least memory first.

    refused: why a schedule has no plan, by its name.
    """

    request: PlanningRequest
    ranked: list[Candidate]
    too_large: list[Candidate]
    refused: dict[str, PlanError]


def choose(request: PlanningRequest, progress: Progress | None = None) -> Answer:
    """Plan every family and the paper's planner (zb_1p, zb_2p), then search for each placement.

    Each is planned with each number of slices; of equal plans that with fewer slices counts. The search takes
    the number of slices of the placement's best plan so far.
    progress(share of the time that is spent, what is being searched) is called often.
    """
    found: list[Candidate] = []
    refused: dict[str, PlanError] = {}
    for name in (*FAMILIES, "zb_1p", "zb_2p"):
        for num_slices in request.slices:
            try:
                found.append(_candidate(request, name, _planned(request, name, num_slices)))
            except PlanError as refusal:
                refused[name if num_slices == 1 else f"{name} --slices {num_slices}"] = refusal
    deadline = Deadline(request.time_limit)
    for placement, share in _SHARES.items():
        try:
            problem = request.problem(placement, _most_promising(request, found, placement))
        except PlanError as refusal:
            refused[f"zb_auto {placement}"] = refusal
            continue
        if progress:
            deadline.watch = _watch(deadline, placement, progress)
            deadline.watch()  # a search may end before the first tenth of a second
        search = LocalSearch(problem, deadline.part(share), request.seed, most_quiet_near_bound=_MOST_QUIET)
        found.append(_candidate(request, "zb_auto", problem.timetable_of(search.run())))
    fitting = [each for each in found if _fits(request, each)]
    too_large = [each for each in found if each not in fitting]
    return Answer(
        request,
        ranked=sorted(fitting, key=_worth),
        too_large=sorted(too_large, key=lambda each: max(each.timeline.peak_memory)),
        refused=refused,
    )


def what_would_buy(request: PlanningRequest, progress: Progress | None = None) -> dict[str, Answer]:
    """What to choose with half the bytes in each message, and with 1.5 and 2 times the memory limit.

    By what is changed, in words. The request has links; without a limit only the bytes are changed. Each
    answer takes the request's time_limit.
    """
    costs, limit = request.costs, request.memory_limit
    assert costs.links is not None
    changed = {"half the bytes": replace(request, costs=replace(costs, links=costs.links.scaled(0.5)))}
    if limit is not None:
        for factor in (1.5, 2.0):
            more = [factor * each for each in limit] if isinstance(limit, Sequence) else factor * limit
            changed[f"{factor:g} x the memory"] = replace(request, memory_limit=more)
    return {name: choose(each, progress) for name, each in changed.items()}


def _most_promising(request: PlanningRequest, found: list[Candidate], placement: str) -> int:
    """The number of slices of the best plan so far that fits, with this placement if one does."""
    fitting = [each for each in found if _fits(request, each)]
    own = [each for each in fitting if each.placement == placement]
    return min(own or fitting, key=_worth).num_slices if fitting else max(request.slices)


def _planned(request: PlanningRequest, name: str, num_slices: int) -> Timetable:
    counts = request.num_ranks, request.num_microbatches
    if name in FAMILIES:
        return plan(name, *counts, num_slices=num_slices)
    return plan(name, *counts, num_slices=num_slices, costs=request.costs_for(request.num_ranks, num_slices))


def _candidate(request: PlanningRequest, name: str, timetable: Timetable) -> Candidate:
    costs = request.costs_for(timetable.num_stages, timetable.num_slices)
    bound = bound_of(request.problem_of(timetable.rank_of, request.memory_limit, timetable.num_slices))
    return Candidate(name, simulate(timetable, costs), bound)


def _watch(deadline: Deadline, placement: str, progress: Progress) -> Callable[[], None]:
    return lambda: progress(deadline.fraction, f"zb_auto --placement {placement}")


def _fits(request: PlanningRequest, candidate: Candidate) -> bool:
    peaks = candidate.timeline.peak_memory
    return fits(peaks, limits_per_rank(request.memory_limit, len(peaks)))


def _worth(candidate: Candidate) -> tuple[float, bool, int, int]:
    """A key to sort candidates by: the shorter time wins.

    Among equal times a plan that does not depend on costs wins, then the plan with fewer slices, then the
    plan with fewer neighbouring stages on different ranks, which sends fewer messages.
    """
    timetable = candidate.timeline.timetable
    num_links = sum(one != other for one, other in pairwise(timetable.rank_of))
    makespan = float(f"{candidate.timeline.makespan:.9g}")
    return makespan, takes_costs(candidate.name), timetable.num_slices, num_links

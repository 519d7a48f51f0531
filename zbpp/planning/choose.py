"""Which schedule to use: every family and the search at the same costs, and what more memory would bring.

`choose` plans and searches. Its `Answer` holds all plans found, and tells which plan is best under which
memory limit, beside the time that no plan can undercut. `zbpp.render.statements` draws conclusions from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

from zbpp.families import FAMILIES
from zbpp.planning.bounds import Bound, bound_of
from zbpp.planning.memory_limit import MemoryLimit, fits, limits_per_rank
from zbpp.planning.objective import MAKESPAN, OBJECTIVES, objective_value
from zbpp.planning.placement import PLACEMENTS, place_stages
from zbpp.planning.plan import check_range, placement_of, plan, takes_costs
from zbpp.planning.problem import Problem
from zbpp.planning.rank_costs import RankCosts
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.paper_planner import memory_of_1f1b
from zbpp.planning.size_limit import BYTES_PER_SEARCHED_ACTION, check_size
from zbpp.planning.tolerance import EQUAL
from zbpp.schedule.costs import Costs
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import PlanError, Timetable

# The memory sweep: limits in 1F1B's memory, and the placements that are searched under each.
SWEEP_MULTIPLES = (1.0, 1.25, 1.5, 1.75, 2.0)
SWEEP_PLACEMENTS = ("one", "v")

Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class PlanningRequest:
    """For which pipeline a schedule is to be chosen.

    costs: for one rank's share of the model. memory_limit: in the unit of costs.saved, for each rank or one
    number per rank. time_limit: seconds of all searches together.
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

    def __post_init__(self) -> None:
        check_range("memory_limit", self.memory_limit)
        check_range("time_limit", self.time_limit)
        check_size(self.num_ranks, self.num_microbatches, 1, BYTES_PER_SEARCHED_ACTION)
        self.problem("one", self.memory_limit, self.objective)  # refuses what can't be planned

    @property
    def other_objective(self) -> str:
        return next(each for each in OBJECTIVES if each != self.objective)

    @cached_property
    def memory_of_1f1b(self) -> float:
        """The activations of as many microbatches as there are ranks: 1.00p in tables."""
        return memory_of_1f1b(self.costs_for(self.num_ranks), self.num_ranks)

    @cached_property
    def limits(self) -> list[MemoryLimit]:
        """The limits of the memory sweep, ascending, and the given limit among them; None comes last.

        A limit that differs between ranks comes first.
        """
        sweep = {multiple * self.memory_of_1f1b for multiple in SWEEP_MULTIPLES}
        if self.memory_limit is None:
            return [*sorted(sweep), None]
        if isinstance(self.memory_limit, Sequence):
            return [self.memory_limit, *sorted(sweep), None]
        return [*sorted(sweep | {float(self.memory_limit)}), None]

    @property
    def span_limits(self) -> list[MemoryLimit]:
        """The limits under which both objectives are tried: the given one, and twice 1F1B's memory."""
        given, twice = self.memory_limit, 2 * self.memory_of_1f1b
        return [given] if given == twice else [given, twice]

    def costs_for(self, num_stages: int) -> Costs:
        """The costs per stage of timetables with so many stages."""
        return self.costs.per_stage(num_stages, self.num_ranks)

    def problem(self, placement: str, limit: MemoryLimit, objective: str) -> Problem:
        """The problem for one placement, limit and objective. Raises PlanError."""
        rank_of = place_stages(self.num_ranks, placement)
        return Problem(rank_of, self.num_microbatches, self.costs_for(len(rank_of)), limit, objective)

    def bound(
        self, placement: str, limit: MemoryLimit, objective: str = "", splits: bool = True
    ) -> Bound | None:
        """What no plan undercuts (ms); None if no plan fits. splits=False: no plan with whole backwards."""
        try:
            return bound_of(self.problem(placement, limit, objective or self.objective), splits)
        except PlanError:
            return None


@dataclass(frozen=True)
class Candidate:
    """A plan, and the name under which `plan` makes it."""

    name: str
    timeline: Timeline

    @property
    def placement(self) -> str:
        return placement_of(self.timeline.timetable)

    @property
    def title(self) -> str:
        """The name, with the placement where the name leaves it open: as scripts/plan.py takes it."""
        return f"{self.name} --placement {self.placement}" if self.name == "zb_auto" else self.name

    def value(self, objective: str) -> float:
        return objective_value(self.timeline, objective)

    def fits(self, limit: MemoryLimit) -> bool:
        peaks = self.timeline.peak_memory
        return fits(peaks, limits_per_rank(limit, len(peaks)))


@dataclass(frozen=True)
class Choice:
    """A candidate under a memory limit, and what no plan with its placement undercuts there."""

    candidate: Candidate
    objective: str
    bound: Bound

    @property
    def value(self) -> float:
        return self.candidate.value(self.objective)

    @property
    def gap(self) -> float:
        return self.value / self.bound.value - 1 if self.bound.value else 0.0

    @property
    def proved_optimal(self) -> bool:
        return self.gap <= EQUAL


@dataclass(frozen=True)
class Answer:
    """All plans found for a request, and why some families have none."""

    request: PlanningRequest
    candidates: list[Candidate]
    refused: dict[str, PlanError]

    @property
    def ranked(self) -> list[Choice]:
        """The plans that fit the request's limit, best first: each family, zb_auto's best per placement."""
        limit, objective = self.request.memory_limit, self.request.objective
        fitting = [each for each in self.candidates if each.fits(limit)]
        searched = [
            min(own, key=lambda each: each.value(objective))
            for placement in PLACEMENTS
            if (own := [each for each in fitting if each.name == "zb_auto" and each.placement == placement])
        ]
        shown = [each for each in fitting if each.name != "zb_auto"] + searched
        return sorted(map(self._choice, shown), key=_worth)

    @property
    def too_large(self) -> list[Candidate]:
        """The families' plans that don't fit, the least memory first."""
        limit = self.request.memory_limit
        rest = [each for each in self.candidates if each.name != "zb_auto" and not each.fits(limit)]
        return sorted(rest, key=lambda each: max(each.timeline.peak_memory))

    def best(self, placement: str, limit: MemoryLimit, objective: str = "") -> Choice | None:
        """The best plan with this placement that fits; None if there is none."""
        objective = objective or self.request.objective
        bound = self.request.bound(placement, limit, objective)
        fitting = [each for each in self.candidates if each.placement == placement and each.fits(limit)]
        if bound is None or not fitting:
            return None
        return Choice(min(fitting, key=lambda each: each.value(objective)), objective, bound)

    def best_of_all(self, limit: MemoryLimit, objective: str = "") -> Choice | None:
        """The best plan that fits, whatever its placement."""
        found = [self.best(placement, limit, objective) for placement in PLACEMENTS]
        return min(filter(None, found), key=lambda choice: choice.value, default=None)

    def named(self, name: str) -> Candidate | None:
        return next((each for each in self.candidates if each.name == name), None)

    def _choice(self, candidate: Candidate) -> Choice:
        bound = self.request.bound(candidate.placement, self.request.memory_limit)
        assert bound is not None  # the candidate fits
        return Choice(candidate, self.request.objective, bound)


def _worth(choice: Choice) -> tuple[float, bool, int]:
    """By time; of equal ones, a plan that needs no costs comes first, then the one with fewer messages."""
    name, timetable = choice.candidate.name, choice.candidate.timeline.timetable
    return float(f"{choice.value:.9g}"), takes_costs(name), num_messages(timetable)


def num_messages(timetable: Timetable) -> int:
    """Messages of a step: an activation and a gradient wherever neighbouring stages are on two ranks."""
    crossings = sum(one != other for one, other in pairwise(timetable.rank_of))
    return 2 * crossings * timetable.num_microbatches


def choose(request: PlanningRequest, progress: Progress | None = None) -> Answer:
    """Plan every family, search every placement under the request's limit, and the memory sweep.

    progress(share done, what is being searched) is called often. Raises PlanError for counts or a
    limit out of range; a family that refuses is part of the answer.
    """
    answer = Answer(request, [], {})
    for name, make in _planned(request):
        try:
            answer.candidates.append(_candidate(request, name, make()))
        except PlanError as error:
            answer.refused[name] = error
    deadline, wanted = Deadline(request.time_limit), _searches(request)
    for number, search in enumerate(wanted):
        if progress:
            progress(number / len(wanted), str(search))
        inner = progress and partial(_within, progress, number, len(wanted), search)
        # A search that ends early, at its bound, leaves its time to the searches after it.
        _search(answer, search, deadline.part(1 / (len(wanted) - number)).seconds, inner)
    return answer


def _planned(request: PlanningRequest) -> Iterator[tuple[str, Callable[[], Timetable]]]:
    """The families, and the paper's planner with 1F1B's memory and with twice that."""
    counts = request.num_ranks, request.num_microbatches
    for name in FAMILIES:
        yield name, partial(plan, name, *counts)
    own = request.costs_for(request.num_ranks)
    for name in ("zb_1p", "zb_2p"):
        yield name, partial(plan, name, *counts, costs=own)


def _candidate(request: PlanningRequest, name: str, timetable: Timetable) -> Candidate:
    return Candidate(name, simulate(timetable, request.costs_for(timetable.num_stages)))


class _Search(NamedTuple):
    """One run of zb_auto."""

    placement: str
    limit: MemoryLimit
    objective: str

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" within {self.limit}"
        return f"{self.objective}, {self.placement}{limit}"


def _searches(request: PlanningRequest) -> list[_Search]:
    """Placements that are soon done come first; the given limit comes before the memory sweep."""
    own, objective = request.memory_limit, request.objective
    others = [limit for limit in request.limits if limit not in (None, own)]
    return [
        *(_Search(placement, own, objective) for placement in PLACEMENTS),
        *(
            _Search(placement, limit, request.other_objective)
            for limit in request.span_limits
            for placement in SWEEP_PLACEMENTS
        ),
        *(_Search(placement, limit, objective) for placement in SWEEP_PLACEMENTS for limit in others),
    ]


def _within(
    progress: Progress, number: int, total: int, search: _Search, share: float, *found: float
) -> None:
    progress((number + share) / total, str(search))


def _search(answer: Answer, search: _Search, seconds: float, progress: Callable[..., None] | None) -> None:
    """Add what is found, unless nothing better than what is known can exist.

    Under the request's own limit and objective zb_auto is always asked: it has a row of its own.
    """
    request, (placement, limit, objective) = answer.request, search
    known = answer.best(placement, limit, objective)
    own = (limit, objective) == (request.memory_limit, request.objective)
    if known and known.proved_optimal and not own:
        return
    num_stages = len(place_stages(request.num_ranks, placement))
    try:
        timetable = plan(
            "zb_auto",
            request.num_ranks,
            request.num_microbatches,
            costs=request.costs_for(num_stages),
            memory_limit=limit,
            placement=placement,
            objective=objective,
            time_limit=seconds,
            seed=request.seed,
            progress=progress,
        )
        answer.candidates.append(_candidate(request, "zb_auto", timetable))
    except PlanError as error:
        if own:
            answer.refused[f"zb_auto {placement}"] = error

"""Which schedule to use: every family and the search at the same costs, and what more memory would bring.

`choose` plans and searches; its `Answer` holds all plans found, and says which is best under which
memory limit, beside what no plan can undercut. `statements` draws conclusions from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

from zbpp.families import FAMILIES
from zbpp.planning.bounds import Bound, lower_bound
from zbpp.planning.compare import per_stage_of
from zbpp.planning.plan import check_range, placement_of, plan, takes_costs
from zbpp.planning.problem import OBJECTIVES, placed, pose
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.paper_planner import memory_of_1f1b
from zbpp.schedule.costs import Costs
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import PlanError, Timetable

PLACEMENTS = ("one", "looped", "v")
MULTIPLES = (1.0, 1.25, 1.5, 1.75, 2.0)  # memory limits that are tried, in 1F1B's memory
LADDER = ("one", "v")  # placements that are tried there
EQUAL = 1e-8  # relative: a plan this close to its bound is optimal

Limit = float | Sequence[float] | None
Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be scheduled.

    Numbers in `costs` are for one rank's share of the model, lists as `per_stage_of` says.
    memory_limit: per rank, in the unit of costs.saved. time_limit: seconds of all searches together.
    Raises PlanError for what is out of range, and for a limit that can't hold one microbatch (with the
    least that works).
    """

    num_ranks: int
    num_microbatches: int
    costs: Costs = field(default_factory=Costs)
    memory_limit: Limit = None
    objective: str = "makespan"
    time_limit: float = 45.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("memory_limit", self.memory_limit)
        check_range("time_limit", self.time_limit)
        pose(
            self.num_ranks,
            self.num_microbatches,
            self.costs_for(self.num_ranks),
            self.memory_limit,
            "one",
            None,
            self.objective,
        )

    @property
    def other_objective(self) -> str:
        return next(each for each in OBJECTIVES if each != self.objective)

    @cached_property
    def unit(self) -> float:
        """1F1B's memory, 1.0p."""
        return memory_of_1f1b(self.costs_for(self.num_ranks), self.num_ranks)

    @cached_property
    def limits(self) -> list[Limit]:
        """The limits that are tried, ascending, the given one among them; None, no limit, comes last."""
        limits = {multiple * self.unit for multiple in MULTIPLES}
        given: list[Limit] = [] if self.memory_limit is None else [self.memory_limit]
        if isinstance(self.memory_limit, int | float):
            limits |= {float(self.memory_limit)}
            given = []
        return [*given, *sorted(limits), None]

    @property
    def span_limits(self) -> list[Limit]:
        """The limits at which both objectives are tried: the given one, and 2p."""
        limits: list[Limit] = [self.memory_limit, 2 * self.unit]
        return limits[: 1 + (limits[0] != limits[1])]

    def costs_for(self, num_stages: int) -> Costs:
        """Per stage, for timetables with so many stages."""
        return per_stage_of(self.costs, num_stages, self.num_ranks)

    def bound(self, placement: str, limit: Limit, objective: str = "", splits: bool = True) -> Bound | None:
        """What no plan undercuts (ms); None if none fits. Without splits: no plan with whole backwards."""
        rank_of = placed(self.num_ranks, placement, None)
        try:
            return lower_bound(
                objective or self.objective,
                rank_of=rank_of,
                num_microbatches=self.num_microbatches,
                costs=self.costs_for(len(rank_of)),
                memory_limit=limit,
                splits=splits,
            )
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
        return self.timeline.makespan if objective == "makespan" else self.timeline.max_span

    def fits(self, limit: Limit) -> bool:
        peaks = self.timeline.peak_memory
        if limit is None:
            return True
        limits = limit if isinstance(limit, Sequence) else [limit] * len(peaks)
        return all(peak <= most * (1 + 1e-9) for peak, most in zip(peaks, limits, strict=True))


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
    """All plans found, and why some families have none."""

    question: Question
    candidates: list[Candidate]
    refused: dict[str, PlanError]

    @property
    def ranked(self) -> list[Choice]:
        """What fits the question's limit, best first: each family, and zb_auto's best per placement."""
        limit, objective = self.question.memory_limit, self.question.objective
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
        """What doesn't fit, the least memory first."""
        limit = self.question.memory_limit
        rest = [each for each in self.candidates if each.name != "zb_auto" and not each.fits(limit)]
        return sorted(rest, key=lambda each: max(each.timeline.peak_memory))

    def best(self, placement: str, limit: Limit, objective: str = "") -> Choice | None:
        """The best plan with this placement that fits; None if there is none."""
        objective = objective or self.question.objective
        bound = self.question.bound(placement, limit, objective)
        fitting = [each for each in self.candidates if each.placement == placement and each.fits(limit)]
        if bound is None or not fitting:
            return None
        return Choice(min(fitting, key=lambda each: each.value(objective)), objective, bound)

    def best_of_all(self, limit: Limit, objective: str = "") -> Choice | None:
        """The best plan that fits, whatever its placement."""
        found = [self.best(placement, limit, objective) for placement in PLACEMENTS]
        return min(filter(None, found), key=lambda choice: choice.value, default=None)

    def named(self, name: str) -> Candidate | None:
        return next((each for each in self.candidates if each.name == name), None)

    def _choice(self, candidate: Candidate) -> Choice:
        bound = self.question.bound(candidate.placement, self.question.memory_limit)
        assert bound is not None  # the candidate fits
        return Choice(candidate, self.question.objective, bound)


def _worth(choice: Choice) -> tuple[float, bool, int]:
    """By time; of equal ones, a plan that needs no costs comes first, then the one with fewer messages."""
    name, timetable = choice.candidate.name, choice.candidate.timeline.timetable
    return float(f"{choice.value:.9g}"), takes_costs(name), num_messages(timetable)


def num_messages(timetable: Timetable) -> int:
    """Messages of a step: an activation and a gradient wherever neighbouring stages are on two ranks."""
    crossings = sum(one != other for one, other in pairwise(timetable.rank_of))
    return 2 * crossings * timetable.num_microbatches


def choose(question: Question, progress: Progress | None = None) -> Answer:
    """Plan every family, search every placement under the question's limit, and the ladder of limits.

    progress(share done, what is being searched) is called often. Raises PlanError for counts or a
    limit out of range; a family that refuses is part of the answer.
    """
    answer = Answer(question, [], {})
    for name, make in _planned(question):
        try:
            answer.candidates.append(_candidate(question, name, make()))
        except PlanError as error:
            answer.refused[name] = error
    deadline, wanted = Deadline(question.time_limit), _searches(question)
    for number, search in enumerate(wanted):
        if progress:
            progress(number / len(wanted), str(search))
        inner = progress and partial(_within, progress, number, len(wanted), search)
        # What ends early, at its bound, leaves its time to those after it.
        _search(answer, search, deadline.part(1 / (len(wanted) - number)).seconds, inner)
    return answer


def _planned(question: Question) -> Iterator[tuple[str, Callable[[], Timetable]]]:
    """The families, and the paper's planner with 1F1B's memory and with twice that."""
    counts = question.num_ranks, question.num_microbatches
    for name in FAMILIES:
        yield name, partial(plan, name, *counts)
    own = question.costs_for(question.num_ranks)
    for name in ("zb_1p", "zb_2p"):
        yield name, partial(plan, name, *counts, costs=own)


def _candidate(question: Question, name: str, timetable: Timetable) -> Candidate:
    return Candidate(name, simulate(timetable, question.costs_for(timetable.num_stages)))


class _Search(NamedTuple):
    """One run of zb_auto."""

    placement: str
    limit: Limit
    objective: str

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" within {self.limit}"
        return f"{self.objective}, {self.placement}{limit}"


def _searches(question: Question) -> list[_Search]:
    """Placements that are soon done come first; below the given limit's, the ladder's."""
    own, objective = question.memory_limit, question.objective
    others = [limit for limit in question.limits if limit not in (None, own)]
    return [
        *(_Search(placement, own, objective) for placement in PLACEMENTS),
        *(
            _Search(placement, limit, question.other_objective)
            for limit in question.span_limits
            for placement in LADDER
        ),
        *(_Search(placement, limit, objective) for placement in LADDER for limit in others),
    ]


def _within(
    progress: Progress, number: int, total: int, search: _Search, share: float, *found: float
) -> None:
    progress((number + share) / total, str(search))


def _search(answer: Answer, search: _Search, seconds: float, progress: Callable[..., None] | None) -> None:
    """Add what is found, unless nothing better than what is known can exist.

    Under the question's own limit and objective zb_auto is always asked: it has a row of its own.
    """
    question, (placement, limit, objective) = answer.question, search
    known = answer.best(placement, limit, objective)
    own = (limit, objective) == (question.memory_limit, question.objective)
    if known and known.proved_optimal and not own:
        return
    num_stages = len(placed(question.num_ranks, placement, None))
    try:
        timetable = plan(
            "zb_auto",
            question.num_ranks,
            question.num_microbatches,
            costs=question.costs_for(num_stages),
            memory_limit=limit,
            placement=placement,
            objective=objective,
            time_limit=seconds,
            seed=question.seed,
            progress=progress,
        )
        answer.candidates.append(_candidate(question, "zb_auto", timetable))
    except PlanError as error:
        if own:
            answer.refused[f"zb_auto {placement}"] = error

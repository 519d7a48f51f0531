"""Plans by every family and every placement's search, at the same costs and under several memory limits.

A user then chooses: which schedule is best, and what would more memory bring?

`choose` plans and searches for a `PlanningRequest`; its `Answer` holds all plans found.
`zbpp.render.statements` draws conclusions from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from zbpp.families import FAMILIES
from zbpp.planning.answer import Answer, Candidate
from zbpp.planning.complete_stages_early import complete_stages_early
from zbpp.planning.memory_limit import MemoryLimit
from zbpp.planning.placement import PLACEMENTS, place_stages
from zbpp.planning.plan import plan
from zbpp.planning.request import SWEEP_PLACEMENTS, PlanningRequest
from zbpp.planning.search.deadline import Deadline
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import PlanError, Timetable

Progress = Callable[[float, str], None]


def choose(request: PlanningRequest, progress: Progress | None = None) -> Answer:
    """Plan every family and the paper's planner (zb_1p, zb_2p), then search.

    Every placement is searched under the request's limit. The placements in SWEEP_PLACEMENTS are searched
    under every limit of the memory sweep, too. answer.refused says why a schedule has no plan; for zb_auto,
    why it has none under the request's limit.
    progress(share done, what is being searched) is called often.
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
        inner = progress and _overall(progress, number, len(wanted), search)
        # A search that ends early, at its bound, leaves its time to the searches after it.
        _search(answer, search, deadline.part(1 / (len(wanted) - number)).seconds, inner)
    return answer


def _planned(request: PlanningRequest) -> Iterator[tuple[str, Callable[[], Timetable]]]:
    """The families, and the paper's planner with 1F1B's memory and with twice that."""
    counts = request.num_ranks, request.num_microbatches
    for name in FAMILIES:
        yield name, partial(plan, name, *counts)
    costs = request.costs_for(request.num_ranks)
    for name in ("zb_1p", "zb_2p"):
        yield name, partial(plan, name, *counts, costs=costs)


def _candidate(request: PlanningRequest, name: str, timetable: Timetable) -> Candidate:
    costs = request.costs_for(timetable.num_stages)
    return Candidate(name, simulate(complete_stages_early(timetable, costs), costs))


class _Search(NamedTuple):
    """One run of zb_auto."""

    placement: str
    limit: MemoryLimit
    objective: str

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" within {self.limit}"
        return f"{self.objective}, {self.placement}{limit}"


def _searches(request: PlanningRequest) -> list[_Search]:
    """First the given limit, then the other objective under span_limits, then the memory sweep."""
    given, objective = request.memory_limit, request.objective
    others = [limit for limit in request.limits if limit not in (None, given)]
    return [
        *(_Search(placement, given, objective) for placement in PLACEMENTS),
        *(
            _Search(placement, limit, request.other_objective)
            for limit in request.span_limits
            for placement in SWEEP_PLACEMENTS
        ),
        *(_Search(placement, limit, objective) for placement in SWEEP_PLACEMENTS for limit in others),
    ]


def _overall(progress: Progress, number: int, total: int, search: _Search) -> Callable[..., None]:
    """The progress of zb_auto in one search, as progress of all searches."""
    return lambda share, *_: progress((number + share) / total, str(search))


def _search(answer: Answer, search: _Search, seconds: float, progress: Callable[..., None] | None) -> None:
    """Add the plan that zb_auto finds, unless a known plan is optimal already.

    Under the request's limit and objective zb_auto always searches: the answer lists zb_auto beside the
    families, so its plan must be there.
    """
    request, (placement, limit, objective) = answer.request, search
    known = answer.best(placement, limit, objective)
    is_listed = (limit, objective) == (request.memory_limit, request.objective)
    if known and known.proved_optimal and not is_listed:
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
        if is_listed:
            answer.refused[f"zb_auto {placement}"] = error

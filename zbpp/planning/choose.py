"""Plans by every family and every placement's search, at the same costs and under several memory limits.

A user then chooses: which schedule is best, and what would more memory bring?

`choose` plans and searches for a `PlanningRequest`; its `Answer` holds all plans found.
`zbpp.render.statements` draws conclusions from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from zbpp.families import FAMILIES
from zbpp.planning.answer import Answer, Candidate
from zbpp.planning.complete_stages_early import complete_stages_early
from zbpp.planning.memory_limit import MemoryLimit
from zbpp.planning.placement import PLACEMENTS
from zbpp.planning.plan import plan
from zbpp.planning.request import SWEEP_PLACEMENTS, PlanningRequest
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.local_search import NEAR_BOUND, LocalSearch
from zbpp.planning.side_by_side import side_by_side
from zbpp.planning.tolerance import EQUAL
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import PlanError, Timetable

Progress = Callable[[float, str], None]

# Rounds without a better plan after which a search ends near its bound: one under the request's limit and
# objective, and any other.
_MOST_QUIET, _MOST_QUIET_BESIDE = 20, 3

# The placements that share a process, for 1, 2 and 3 processes. A V takes longer than the others together.
# A search uses earlier plans of its own placement only, so what it finds does not depend on the lanes.
_LANES = ((("one", "looped", "v"),), (("v",), ("one", "looped")), (("v",), ("looped",), ("one",)))


def choose(request: PlanningRequest, progress: Progress | None = None, num_processes: int = 1) -> Answer:
    """Plan every family and the paper's planner (zb_1p, zb_2p), then search.

    Every placement is searched under the request's limit. The placements in SWEEP_PLACEMENTS are searched
    under every limit of the memory sweep, too. answer.refused says why a schedule has no plan; for zb_auto,
    why it has none under the request's limit.
    progress(share done, what is being searched) is called often.
    num_processes: with 2 or more, placements are searched at the same time, in up to 3 new processes. These
    import the program that calls: it needs its `if __name__ == "__main__":`.
    """
    answer = Answer(request, [], {})
    for name, make in _planned(request):
        try:
            answer.candidates.append(_candidate(request, name, make()))
        except PlanError as refusal:
            answer.refused[name] = refusal
    found = _search_lanes(answer, _LANES[min(num_processes, len(_LANES)) - 1], progress or _ignore)
    for search, result in sorted(found, key=lambda each: _searches(request).index(each[0])):
        if isinstance(result, Candidate):
            answer.candidates.append(result)
        elif _is_listed(request, search):
            answer.refused[f"zb_auto {search.placement}"] = result
    return answer


def _ignore(share: float, what: str) -> None:
    """Without progress: nothing is shown."""


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
    """First the memory sweep, ascending, the given limit in it. Then a loop, and the other objective."""
    given, objective = request.memory_limit, request.objective
    others = [placement for placement in PLACEMENTS if placement not in SWEEP_PLACEMENTS]
    return [
        *(_Search(placement, limit, objective) for placement in SWEEP_PLACEMENTS for limit in request.limits),
        *(_Search(placement, given, objective) for placement in others),
        *(
            _Search(placement, limit, request.other_objective)
            for placement in SWEEP_PLACEMENTS
            for limit in request.span_limits
        ),
    ]


_Found = list[tuple[_Search, Candidate | PlanError]]


def _search_lanes(answer: Answer, lanes: Sequence[tuple[str, ...]], progress: Progress) -> _Found:
    """Search the placements of each lane in a process of its own; one lane is searched here."""
    if len(lanes) == 1:
        return _search_lane(answer, lanes[0], progress)
    shares = [0.0] * len(lanes)

    def heard(number: int, share: float, what: str) -> None:
        shares[number] = share
        progress(sum(shares) / len(lanes), what)

    return [*chain(*side_by_side(_search_lane, [(answer, lane) for lane in lanes], heard))]


def _search_lane(answer: Answer, lane: tuple[str, ...], progress: Progress) -> _Found:
    """Search these placements one after the other; `answer` has the plans to begin with."""
    request, found = answer.request, _Found()
    wanted = [search for search in _searches(request) if search.placement in lane]
    # A lane has its share of the time, or each search would take longer where there are more processes.
    deadline = Deadline(request.time_limit * len(wanted) / len(_searches(request)))
    for number, search in enumerate(wanted):
        progress(number / len(wanted), str(search))
        earlier = [result for _, result in found if isinstance(result, Candidate)]
        known = Answer(request, [*answer.candidates, *earlier], {})
        if not _is_listed(request, search) and _is_answered(known, search, wanted[:number]):
            continue
        inner = _overall(progress, number, len(wanted), search)
        # A search that ends early, at its bound, leaves its time to the searches after it.
        part = deadline.part(1 / (len(wanted) - number))
        found.append((search, _search(known, search, part, inner)))
    return found


def _overall(progress: Progress, number: int, total: int, search: _Search) -> Callable[..., None]:
    """The progress of zb_auto in one search, as progress of all searches."""
    return lambda share, *_: progress((number + share) / total, str(search))


def _search(
    answer: Answer, search: _Search, deadline: Deadline, progress: Callable[..., None]
) -> Candidate | PlanError:
    """The plan that a search finds, or why there is none.

    It begins with the plans known for its placement, beside the families. Near the bound it ends soon,
    later under the request's limit and objective.
    """
    request, (placement, limit, objective) = answer.request, search
    try:
        problem = request.problem(placement, limit, objective)
    except PlanError as error:
        return error
    known = [each.timeline.timetable for each in answer.candidates if each.placement == placement]
    most_quiet = _MOST_QUIET if _is_listed(request, search) else _MOST_QUIET_BESIDE
    found = LocalSearch(problem, deadline, request.seed, progress, known, most_quiet)
    return _candidate(request, "zb_auto", problem.timetable_of(found.run()))


def _is_listed(request: PlanningRequest, search: _Search) -> bool:
    """Whether the answer lists the search beside the families, so that its plan must be there."""
    return (search.limit, search.objective) == (request.memory_limit, request.objective)


def _is_answered(answer: Answer, search: _Search, earlier: list[_Search]) -> bool:
    """Whether a known plan is optimal, or as good as another search for the same bound could make it.

    The latter if the plan is near the bound, and no plan of the placement is better with any memory.
    """
    placement, limit, objective = search
    known, best = (answer.best(placement, each, objective) for each in (limit, None))
    if known is None or best is None or known.proved_optimal:
        return known is not None
    if not (known.gap <= NEAR_BOUND and known.value <= best.value * (1 + EQUAL)):
        return False
    same = [each.limit for each in earlier if (each.placement, each.objective) == (placement, objective)]
    bounds = [answer.request.bound(placement, each, objective) for each in same]
    return any(bound and abs(known.bound.gap(bound.value)) <= EQUAL for bound in bounds)

"""`optimal` and `solve`: the doors to exact planning."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from zbpp.planning.bounds import lower_bound
from zbpp.planning.exact.case import TOLERANCE, Case
from zbpp.planning.exact.model import Model, Progress, import_solver
from zbpp.planning.problem import pose
from zbpp.planning.search import zb_auto
from zbpp.schedule.costs import Costs
from zbpp.schedule.timetable import Timetable

_SHARE_OF_SEARCH = 0.3  # of the time, for a plan to begin with


@dataclass(frozen=True)
class Exact:
    """A timetable, what it takes (ms), and what none can undercut (ms); proved: the two agree."""

    timetable: Timetable
    value: float
    bound: float
    proved: bool


def optimal(
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: Costs = Costs(),
    memory_limit: float | Sequence[float] | None = None,
    placement: str | None = None,
    stages_per_rank: int | None = None,
    objective: str = "makespan",
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Timetable:
    """The timetable with the smallest makespan or max span, as far as the time (s) allows.

    placement: "one" (None), "looped" or "v"; stages_per_rank: None for one, else two.
    memory_limit: in the unit of costs.saved, per rank or one per rank.
    Begins with what `zb_auto` finds in part of the time, and is done at once where that attains
    the lower bound. `certificate` or `solve` say whether the result is proved; errors as in `solve`.
    """
    began = time.monotonic()
    import_solver()
    shape = pose(num_ranks, num_microbatches, costs, memory_limit, placement, stages_per_rank, objective)
    case = Case(shape.rank_of, num_microbatches, costs, memory_limit, objective)
    start = zb_auto(
        num_ranks,
        num_microbatches,
        costs=costs,
        memory_limit=memory_limit,
        placement=placement,
        stages_per_rank=stages_per_rank,
        objective=objective,
        time_limit=_SHARE_OF_SEARCH * time_limit,
        seed=seed,
        progress=progress and _part(progress, 0.0, _SHARE_OF_SEARCH),
    )
    known = lower_bound(
        objective,
        rank_of=shape.rank_of,
        num_microbatches=num_microbatches,
        costs=costs,
        memory_limit=memory_limit,
    )
    left = max(0.0, time_limit - (time.monotonic() - began))
    rest = progress and _part(progress, _SHARE_OF_SEARCH, 1.0)
    return _solved(case, left, seed, start, known.value, rest).timetable


def solve(
    rank_of: Sequence[int],
    num_microbatches: int,
    *,
    costs: Costs = Costs(),
    memory_limit: float | Sequence[float] | None = None,
    objective: str = "makespan",
    time_limit: float = 10.0,
    seed: int = 0,
    start: Timetable | None = None,
    known_bound: float = 0.0,
    progress: Progress | None = None,
) -> Exact:
    """The best timetable for a placement, rank_of[stage], with its proof status.

    start: a timetable to begin with (of this placement, within the limit); the result is never
    worse. known_bound: a lower bound in ms that the caller vouches for: who attains it is done.
    progress(share of the time that is spent, best value, bound) is called at each better one.
    Raises PlanError without OR-tools, above 4 ranks or 400 actions, for a limit that can't
    hold one microbatch, for actions that take no time, and for a start that doesn't fit.
    """
    case = Case(tuple(rank_of), num_microbatches, costs, memory_limit, objective)
    return _solved(case, time_limit, seed, start, known_bound, progress)


def _solved(
    case: Case,
    time_limit: float,
    seed: int,
    start: Timetable | None,
    known_bound: float,
    progress: Progress | None,
) -> Exact:
    solver = import_solver()
    first = case.one_by_one() if start is None else start
    timeline = case.checked(first)
    value = case.value(timeline)
    if start is not None and value <= known_bound * (1 + TOLERANCE):
        return Exact(first, value, min(known_bound, value), proved=True)
    model = Model(case, solver)
    model.hint(timeline)
    found, bound = model.solve(time_limit, seed, known_bound, progress)
    candidates = [timeline, *(case.timeline(each) for each in found)]
    best = min(candidates, key=case.value)
    value, bound = case.value(best), max(bound, known_bound)
    return Exact(best.timetable, value, min(bound, value), proved=value <= bound * (1 + TOLERANCE))


def _part(progress: Progress, begin: float, end: float) -> Progress:
    """Progress of a part of the work, from the share `begin` to `end` of the whole."""
    return lambda share, best, bound: progress(begin + share * (end - begin), best, bound)

"""`zb_auto`: the entry to the search."""

from __future__ import annotations

from zbpp.planning.memory_limit import MemoryLimit
from zbpp.planning.problem import Problem
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.local_search import LocalSearch, Progress
from zbpp.planning.search.paper_planner import paper_plan
from zbpp.schedule.costs import Costs
from zbpp.schedule.timetable import PlanError, Timetable


def zb_auto(
    num_ranks: int,
    num_microbatches: int,
    *,
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
    Reductions: with one stage per rank they count as `simulate` counts them. With more stages the search
    counts each rank's shortest one, behind the rank's row; `simulate` then says which plan found is best.
    Where BW is shorter than B and W, or holds less, each backward is split or whole as it pays.
    progress(share of time_limit that is spent, best objective so far in ms, lower bound in ms) is called
    about ten times a second, and at the end with a share of 1.

    search=False: the planner of Zero Bubble (arXiv:2401.10241, section 3.1) and nothing else; one
    stage per rank, smallest max span. Without a memory limit each rank runs as many F's as there is
    time for before its first B can arrive, no more, so its memory ends near 2p.

    Raises PlanError for a limit that can't hold one microbatch (with the least that works, per
    rank), for arguments out of range, and for a placement that contradicts stages_per_rank or, with
    search=False, is not "one".
    """
    problem = Problem.placed(
        num_ranks,
        num_microbatches,
        costs=costs,
        memory_limit=memory_limit,
        placement=placement,
        stages_per_rank=stages_per_rank,
        objective=objective,
    )
    if not time_limit >= 0:  # NaN too
        raise PlanError(f"time_limit={time_limit!r}: write seconds, 0 or more")
    if search:
        return problem.timetable_of(LocalSearch(problem, Deadline(time_limit), seed, progress).run())
    if problem.placement != "one":
        raise PlanError(f"the paper's planner (search=False) has one stage per rank, not {placement!r}")
    return problem.timetable_of(paper_plan(problem))

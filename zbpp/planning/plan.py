"""`plan`: the one entry to every schedule; `compare`: several schedules for the same model.

The function behind a name is called with num_ranks, num_microbatches and those of plan's options that it
declares as keyword-only parameters. `plan` then checks the timetable against placement, stages_per_rank,
memory_limit and the lengths of the costs' lists, whether the function knows these options or not. The options
of a search (objective, search, time_limit, seed, progress) have no effect on a schedule that does not search.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zbpp.error_text import did_you_mean
from zbpp.planning.memory_limit import MemoryLimit, check_fits, limits_per_rank
from zbpp.planning.options import MAKESPAN, check_count
from zbpp.planning.placement import has_placement, place_stages, placement_name
from zbpp.planning.rank_costs import RankCosts
from zbpp.planning.search import zb_1p, zb_2p, zb_auto
from zbpp.schedule.costs import Costs
from zbpp.schedule.families import FAMILIES
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import PlanError, Timetable, shown
from zbpp.tracebacks import hiding_own_frames

SCHEDULES: dict[str, Callable[..., Timetable]] = {
    **FAMILIES,
    "zb_1p": zb_1p,
    "zb_2p": zb_2p,
    "zb_auto": zb_auto,
}


def check_name(name: str) -> None:
    """Raises PlanError, with the name that may be meant, for a name that is not in `SCHEDULES`."""
    if name not in SCHEDULES:
        hint = did_you_mean(name, SCHEDULES)
        raise PlanError(f"unknown schedule {shown(name)}; known: {', '.join(SCHEDULES)}{hint}")


def takes_costs(name: str) -> bool:
    """Whether there is such a schedule, and its plan depends on the costs."""
    return name in SCHEDULES and "costs" in inspect.signature(SCHEDULES[name]).parameters


@hiding_own_frames
def plan(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    num_slices: int = 1,
    costs: Costs = Costs(),
    memory_limit: MemoryLimit = None,
    placement: str | None = None,
    stages_per_rank: int | None = None,
    objective: str = MAKESPAN,
    search: bool = True,
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Callable[[float, float, float], None] | None = None,
) -> Timetable:
    """The timetable of a schedule in `SCHEDULES`.

    num_slices: into how many slices each sequence is cut along time, see timetable.py. costs are those of
    whole microbatches; `costs.sliced` says where slices begin, else all slices cost the same.
    memory_limit: in the unit of costs.saved, one number for all ranks, or a list with one per rank;
    None: no limit.
    placement ("one" | "looped" | "v"), stages_per_rank: None for the schedule's own (zb_auto: one).

    For zb_auto, zb_1p and zb_2p, which search:
    objective: "makespan", or "span", the longest of the ranks' spans. search: see zb_auto.
    time_limit: in s; the search begins with the families' plans, and makes these even if the time is over.
    seed: the same seed gives the same timetable, unless the time ran out.
    progress(share of time_limit that is spent, best objective so far in ms, lower bound in ms) is called
    about ten times a second, and at the end with a share of 1. An exception in it ends the search.

    Raises PlanError for an unknown name, counts below 1, lists of another length than there are stages or
    ranks, a placement or stages_per_rank that the schedule doesn't have, a number of microbatches that it
    can't run, and a memory limit that is too low (the message says what is needed, per rank).
    """
    check_name(name)
    check_count("num_ranks", num_ranks)
    check_count("num_microbatches", num_microbatches)
    check_count("num_slices", num_slices)
    if stages_per_rank is not None:
        check_count("stages_per_rank", stages_per_rank)
    if placement is not None:
        place_stages(num_ranks, placement, stages_per_rank)  # refuses a contradiction, whatever the schedule
    limits = limits_per_rank(memory_limit, num_ranks)
    shape = {"placement": placement, "stages_per_rank": stages_per_rank, "num_slices": num_slices}
    searching = {"objective": objective, "search": search, "time_limit": time_limit, "seed": seed}
    options = {"costs": costs, "memory_limit": memory_limit, **shape, **searching, "progress": progress}
    timetable = _generated(name, num_ranks, num_microbatches, options)
    _check_placement(name, timetable, placement, stages_per_rank)
    costs.of_units(timetable)  # refuses lists of another length
    if memory_limit is not None:
        check_fits(name, simulate(timetable, costs).peak_memory, limits, costs.memory_unit)
    return timetable


def check_shape(name: str, num_ranks: int, *, placement: str | None, stages_per_rank: int | None) -> None:
    """Raise the PlanError of `plan` for a placement or stages_per_rank that the schedule doesn't have.

    No plan of full size is made: the answer is the same for two ranks and for more.
    """
    if placement is not None or stages_per_rank is not None:
        few = min(num_ranks, 2)
        plan(name, few, 2 * few, placement=placement, stages_per_rank=stages_per_rank, time_limit=0.0)


def _generated(name: str, num_ranks: int, num_microbatches: int, options: Mapping[str, Any]) -> Timetable:
    """The timetable of the function behind a name, which is given the options that it declares."""
    declared = inspect.signature(SCHEDULES[name]).parameters
    if options["num_slices"] > 1 and "num_slices" not in declared:
        raise PlanError(
            f"{name} has no slices, and num_slices={options['num_slices']}: the paper's planner runs a "
            "microbatch's B as soon as its F has run; zb_auto and zb_h1 have slices"
        )
    given = {key: value for key, value in options.items() if key in declared and value is not None}
    return SCHEDULES[name](num_ranks, num_microbatches, **given)


def placement_of(timetable: Timetable) -> str:
    """ "one" stage per rank, "looped" (stage s on rank s mod p), "v" (down and back up), or "other"."""
    return placement_name(timetable.rank_of)


def _check_placement(
    name: str, timetable: Timetable, placement: str | None, stages_per_rank: int | None
) -> None:
    own, per_rank = placement_of(timetable), timetable.num_stages // timetable.num_ranks
    if placement is not None and not has_placement(timetable.rank_of, placement):
        raise PlanError(f"{name} places its stages as {own!r}, not {placement!r}: leave placement out")
    if stages_per_rank is not None and stages_per_rank != per_rank:
        raise PlanError(
            f"{name} has {per_rank} stage(s) per rank, not {stages_per_rank}: leave stages_per_rank out"
        )


def compare(
    names: Iterable[str],
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: RankCosts | None = None,
    **options: Any,
) -> dict[str, Timeline | PlanError]:
    """The timeline of each schedule, or the PlanError with which it refuses.

    costs: for one rank's share of the model, so that all schedules run the same model.
    options: as `plan` takes them, for each schedule; with num_slices, costs.sliced says where slices begin.
    Raises PlanError for an unknown name.
    """

    costs = RankCosts() if costs is None else costs

    def outcome(name: str, num_stages: int) -> Timeline | PlanError:
        try:
            per_stage = costs.per_stage(num_stages, num_ranks)
            timetable = plan(name, num_ranks, num_microbatches, costs=per_stage, **options)
            return simulate(timetable, per_stage)
        except PlanError as error:
            return error

    shape = {key: options.get(key) for key in ("placement", "stages_per_rank")}
    per_rank = {name: stages_per_rank(name, **shape) for name in names}
    return {name: outcome(name, num_ranks * number) for name, number in per_rank.items()}


def stages_per_rank(name: str, *, placement: str | None = None, stages_per_rank: int | None = None) -> int:
    """How many stages a schedule puts on each rank, as its plan for 1 rank and 2 microbatches shows."""
    try:
        return plan(name, 1, 2, placement=placement, stages_per_rank=stages_per_rank).num_stages
    except PlanError:  # The schedule can't have this shape. So plan its own; `outcome` will raise the error.
        return plan(name, 1, 2).num_stages

"""Several schedules for the same model: the timeline of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zbpp.planning.plan import plan
from zbpp.planning.rank_costs import RankCosts, check_rank_costs
from zbpp.planning.schedules import canonical_name
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import PlanError


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
    options: as `plan` takes them, for each schedule.
    The keys are the names in `SCHEDULES`. Raises PlanError for an unknown name.
    """

    costs = RankCosts() if costs is None else costs
    check_rank_costs(costs)

    def outcome(name: str, num_stages: int) -> Timeline | PlanError:
        try:
            per_stage = costs.per_stage(num_stages, num_ranks)
            timetable = plan(name, num_ranks, num_microbatches, costs=per_stage, **options)
            return simulate(timetable, per_stage)
        except PlanError as error:
            return error

    shape = {key: options.get(key) for key in ("placement", "stages_per_rank")}
    per_rank = {name: stages_per_rank(name, **shape) for name in map(canonical_name, names)}
    return {name: outcome(name, num_ranks * number) for name, number in per_rank.items()}


def stages_per_rank(name: str, *, placement: str | None = None, stages_per_rank: int | None = None) -> int:
    """How many stages a schedule puts on each rank, as its plan for 1 rank and 2 microbatches shows."""
    try:
        return plan(name, 1, 2, placement=placement, stages_per_rank=stages_per_rank).num_stages
    except PlanError:  # The schedule can't have this shape. So plan its own; `outcome` will raise the error.
        return plan(name, 1, 2).num_stages

"""Several schedules for the same model: what each would cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zbpp.planning.plan import canonical_name, plan
from zbpp.planning.rank_costs import RankCosts
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
    The names in the answer are those of `SCHEDULES`. Raises PlanError for an unknown name.
    """

    def outcome(name: str, num_stages: int) -> Timeline | PlanError:
        try:
            own = (costs or RankCosts()).per_stage(num_stages, num_ranks)
            timetable = plan(name, num_ranks, num_microbatches, costs=own, **options)
            return simulate(timetable, own)
        except PlanError as error:
            return error

    shape = {key: options.get(key) for key in ("placement", "stages_per_rank")}
    num_stages = {name: num_ranks * stages_per_rank(name, **shape) for name in map(canonical_name, names)}
    return {name: outcome(name, number) for name, number in num_stages.items()}


def stages_per_rank(name: str, placement: str | None = None, stages_per_rank: int | None = None) -> int:
    """How many stages a schedule puts on each rank: its smallest timetable shows it."""
    try:
        return plan(name, 1, 2, placement=placement, stages_per_rank=stages_per_rank).num_stages
    except PlanError:  # it has another shape than the one asked for
        return plan(name, 1, 2).num_stages

"""Several schedules for the same model: what each would cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from zbpp.schedule.costs import Costs
from zbpp.schedule.planner import plan
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import PlanError


def compare(
    names: Iterable[str],
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> dict[str, Timeline | PlanError]:
    """The timeline of each schedule, or the PlanError with which it refuses.

    Numbers in `costs` are for one rank's share of the model, as `per_stage_of` says, so that
    all schedules run the same model. Raises PlanError for a name that nobody knows.
    """

    def outcome(name: str, own: Costs) -> Timeline | PlanError:
        try:
            timetable = plan(name, num_ranks, num_microbatches, costs=own, memory_limit=memory_limit)
            return simulate(timetable, own)
        except PlanError as error:
            return error

    return {name: outcome(name, per_stage_of(costs or Costs(), stages_per_rank(name))) for name in names}


def per_stage_of(costs: Costs, stages_per_rank: float) -> Costs:
    """The costs of stages that share a rank's part of the model evenly.

    f, b, w, bw, saved and deferred are divided where they are one number; lists are per stage
    already, and a message is as large as before.
    """
    shared = {
        name: value / stages_per_rank
        for name, value in vars(costs).items()
        if name != "comm" and isinstance(value, int | float)
    }
    return replace(costs, **shared)


def stages_per_rank(name: str) -> int:
    """How many stages a family puts on each rank: its smallest timetable shows it."""
    return plan(name, 1, 2).num_stages

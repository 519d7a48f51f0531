"""Several schedules for the same model: what each would cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from zbpp.planning.plan import canonical_name, plan
from zbpp.schedule.costs import Costs, PerStage
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import PlanError


def compare(
    names: Iterable[str],
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: Costs | None = None,
    **options: Any,
) -> dict[str, Timeline | PlanError]:
    """The timeline of each schedule, or the PlanError with which it refuses.

    Numbers in `costs` are for one rank's share of the model, as `per_stage_of` says, so that
    all schedules run the same model. options: as `plan` takes them, for each schedule.
    Names as in `SCHEDULES`, however they were spelled. Raises PlanError for one that nobody knows.
    """

    def outcome(name: str, num_stages: int) -> Timeline | PlanError:
        try:
            own = per_stage_of(costs or Costs(), num_stages, num_ranks)
            timetable = plan(name, num_ranks, num_microbatches, costs=own, **options)
            return simulate(timetable, own)
        except PlanError as error:
            return error

    shape = {key: options.get(key) for key in ("placement", "stages_per_rank")}
    num_stages = {name: num_ranks * stages_per_rank(name, **shape) for name in map(canonical_name, names)}
    return {name: outcome(name, number) for name, number in num_stages.items()}


def per_stage_of(costs: Costs, num_stages: int, num_ranks: int) -> Costs:
    """The costs of `num_stages` stages that run the model for which `costs` are given.

    A number is for one rank's share of the model: its stages have equal parts of it. A list, with one
    number for each of some multiple of num_ranks stages, is made finer or coarser, in model order: a
    stage falls into equal parts, or neighbours become one. A message is as large as before.
    Raises PlanError without a rank.
    """
    if num_ranks < 1:
        raise PlanError(f"num_ranks={num_ranks}: write a whole number, 1 or more")
    fitted: dict[str, Any] = {
        name: _fitted(value, num_stages, num_ranks, is_message=name == "comm")
        for name, value in costs.numbers.items()
    }
    return replace(costs, **fitted)


def _fitted(value: PerStage, num_stages: int, num_ranks: int, is_message: bool) -> PerStage:
    if isinstance(value, int | float):
        return value if is_message else value * num_ranks / num_stages
    length = len(value)
    if not length or length % num_ranks or max(length, num_stages) % min(length, num_stages):
        return value  # whoever resolves it per stage says what is wrong
    parts, group = max(num_stages // length, 1), max(length // num_stages, 1)
    whole = max if is_message else sum
    grouped = [whole(value[start : start + group]) for start in range(0, length, group)]
    return [number / (1 if is_message else parts) for number in grouped for _ in range(parts)]


def stages_per_rank(name: str, placement: str | None = None, stages_per_rank: int | None = None) -> int:
    """How many stages a schedule puts on each rank: its smallest timetable shows it."""
    try:
        return plan(name, 1, 2, placement=placement, stages_per_rank=stages_per_rank).num_stages
    except PlanError:  # it has another shape than the one asked for
        return plan(name, 1, 2).num_stages

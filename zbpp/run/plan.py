"""The timetable that a run begins with, and the run's title."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from zbpp.config import NUM_MICROBATCHES, ConfigError, ScheduleConfig, TrainConfig, naming
from zbpp.planning import (
    RankCosts,
    canonical_name,
    compare,
    placement_of,
    plan,
    read_costs,
    read_memory_limit,
    takes_costs,
)
from zbpp.planning.plan import stages_per_rank
from zbpp.run.model import layers_per_stage
from zbpp.runtime import ActivationOffload
from zbpp.schedule import Costs, Op, PlanError, Timetable, read_timetable
from zbpp.training.measured_steps import Title
from zbpp.training.replan import Replan


def build_timetable(schedule: ScheduleConfig, num_ranks: int, num_microbatches: int | None) -> Timetable:
    """Plan by the schedule's name, or read its file. Raises PlanError or ConfigError."""
    _check_replan(schedule.replan)
    options = {**schedule.options, "costs": schedule.costs}
    try:
        if schedule.timetable is not None:
            return plan_from_file(schedule.timetable, num_ranks, num_microbatches, **options)
        return plan_by_name(schedule.name, num_ranks, num_microbatches or NUM_MICROBATCHES, **options)
    except OSError as error:
        raise ConfigError(f"schedule: {error}; name a file that zbpp plan or zbpp measure wrote") from error


def costs_of(schedule: ScheduleConfig, timetable: Timetable) -> Costs:
    """The times in schedule.costs, or else F, B and W of equal length."""
    whole = RankCosts() if schedule.costs is None else read_costs(schedule.costs)[0]
    return whole.per_stage(timetable.num_stages, timetable.num_ranks)


def build_offload(config: TrainConfig, costs: Costs) -> ActivationOffload:
    """Which activations leave device memory, by the times in schedule.costs. Raises ConfigError."""
    gib: Any = config.memory.offload  # "auto" or a number: the config has checked it
    with naming(f"memory.offload={gib}, schedule.costs={config.schedule.costs}"):
        return ActivationOffload(costs, gib)


def build_replan(
    config: TrainConfig, timetable: Timetable, loss_fn: Callable[..., Any], stages: Mapping[int, nn.Module]
) -> Replan | None:
    """The Replan that plans schedule.replan for the same cut after the first steps; None if it names none."""
    name, limit = config.schedule.replan, config.memory.limit
    if name is None:
        return None

    def plan_again(costs: Costs, limits: Sequence[float]) -> Timetable:
        return plan(
            name,
            timetable.num_ranks,
            timetable.num_microbatches,
            costs=costs,
            memory_limit=limits,
            placement=placement_of(timetable),
            stages_per_rank=timetable.num_stages // timetable.num_ranks,
        )

    memory_limit = None if limit is None else limit * 2**30
    return Replan(plan=plan_again, loss_fn=loss_fn, stages=stages, memory_limit=memory_limit)


def check_plan(schedule: ScheduleConfig, num_ranks: int, num_microbatches: int | None) -> None:
    """Make the plan once, so that PlanError or ConfigError is raised if it can't be made.

    A schedule that is planned for costs is not tried, since it may take a search.
    """
    _check_replan(schedule.replan)
    if schedule.timetable is not None or not takes_costs(schedule.name):
        build_timetable(schedule, num_ranks, num_microbatches)


def _check_replan(name: str | None) -> None:
    """Raise ConfigError for a schedule to switch to that does not exist."""
    if name is not None:
        with naming("schedule.replan"):
            canonical_name(name)


def check_layers(model: Any, schedule: ScheduleConfig, num_ranks: int) -> None:
    """Raise ConfigError if the schedule has more stages on so many ranks than the model has layers.

    Checked before planning and before ranks start, which take minutes for thousands of stages and ranks.
    """
    if schedule.timetable is None:
        per_rank = stages_per_rank(
            schedule.name, placement=schedule.placement, stages_per_rank=schedule.stages_per_rank
        )
        layers_per_stage(model, num_ranks * per_rank)


def title_of(schedule: ScheduleConfig, *, is_replanned: bool = False) -> Title:
    """The run's title: the name of its schedule, or of its plan's file."""
    first = canonical_name(schedule.name) if schedule.timetable is None else Path(schedule.timetable).stem
    return Title(str(schedule.replan), replanned_from=first) if is_replanned else Title(first)


# ----------------------------------------------------------------
# The plan that a run begins with: made for a schedule's name, or read from a file.


def plan_by_name(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: str | None = None,
    memory_limit: float | str | None = None,
    placement: str | None = None,
    stages_per_rank: int | None = None,
) -> Timetable:
    """The plan that `zbpp plan` prints for the same arguments.

    costs: a file that `zbpp measure` wrote. memory_limit: what each rank may hold, in activations of its
    share of the model, or with a unit ("12GiB") where the costs are in bytes. Raises PlanError or OSError.
    """
    measured = RankCosts() if costs is None else read_costs(costs)[0]
    (outcome,) = compare(
        [name],
        num_ranks,
        num_microbatches,
        costs=measured,
        memory_limit=read_memory_limit(memory_limit, measured),
        placement=placement,
        stages_per_rank=stages_per_rank,
    ).values()
    if isinstance(outcome, PlanError):
        raise outcome
    return outcome.timetable


def plan_from_file(file: str, num_ranks: int, num_microbatches: int | None, **options: object) -> Timetable:
    """The plan in a file, in any form that `zbpp plan` writes; num_microbatches None: as many as it has.

    options: the arguments of `plan_by_name`; a file leaves nothing to plan, so each must be None. Raises
    PlanError or OSError.
    """
    for option, value in options.items():
        if value is not None:
            raise PlanError(f"{file} is a plan already: leave schedule.{option}={value} out")
    timetable = read_timetable(file)
    if not all(np.isin(row.ops, (Op.W, Op.BW)).any() for row in timetable.rows):
        raise PlanError(f"{file} is no plan to train by: a rank has no W and no BW")
    if timetable.num_ranks != num_ranks:
        raise PlanError(
            f"{file} is a plan for {timetable.num_ranks} ranks, not for {num_ranks}: write "
            f"-n {timetable.num_ranks}, or torchrun --nproc-per-node {timetable.num_ranks} (times replicate, "
            "shard and tensor)"
        )
    if num_microbatches not in (None, timetable.num_microbatches):
        raise PlanError(
            f"{file} is a plan for {timetable.num_microbatches} microbatches, not for "
            f"num_microbatches={num_microbatches}: leave num_microbatches out"
        )
    return timetable

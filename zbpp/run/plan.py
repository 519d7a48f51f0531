"""The timetable that a run begins with, and the run's title."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from zbpp.config import NUM_MICROBATCHES, ConfigError, ScheduleConfig, TrainConfig, naming
from zbpp.features.activation_offload.activation_offload import ActivationOffload
from zbpp.features.messages_ahead.messages_ahead import MessagesAhead
from zbpp.planning import (
    MemoryLimit,
    RankCosts,
    check_name,
    messages_ahead,
    placement_of,
    plan,
    read_costs,
    read_memory_limit,
    takes_costs,
)
from zbpp.planning.plan import check_shape, stages_per_rank
from zbpp.planning.slices import balanced_bounds, balanced_shares
from zbpp.run.model import build_model, layers_per_stage
from zbpp.runtime import Extra
from zbpp.schedule import Costs, Op, PlanError, Timetable, read_timetable, simulate
from zbpp.schedule.slice_bounds import bounds_for, checked_bounds
from zbpp.training.measured_steps import Title
from zbpp.training.replan import Replan

_SLICES = "schedule.slices"  # the key whose bounds are wrong


def planned(config: TrainConfig, num_ranks: int) -> Timetable:
    """The timetable of a run, whose model has a layer for each stage. Raises PlanError or ConfigError."""
    return check_plan(config, num_ranks) or build_timetable(
        config.schedule, num_ranks, config.num_microbatches
    )


def check_plan(config: TrainConfig, num_ranks: int) -> Timetable | None:
    """The timetable; None if it takes a search, which is not made here. Raises PlanError or ConfigError.

    What the config alone shows is refused before the model is made, and before a search.
    """
    schedule, timetable = config.schedule, None
    _check_replan(schedule.replan)
    if schedule.timetable is not None or not takes_costs(schedule.name):
        timetable = build_timetable(schedule, num_ranks, config.num_microbatches)
    else:
        _plan_options(schedule, num_ranks)
    check_layers(build_model(config.model, config.seed, config.finetune), schedule, num_ranks)
    return timetable


def build_timetable(schedule: ScheduleConfig, num_ranks: int, num_microbatches: int | None) -> Timetable:
    """Plan by the schedule's name, as `zbpp plan` does, or read its file. Raises PlanError or ConfigError."""
    if schedule.timetable is not None:
        return plan_from_file(schedule, num_ranks, num_microbatches)
    options = _plan_options(schedule, num_ranks)
    return plan(schedule.name, num_ranks, num_microbatches or NUM_MICROBATCHES, **options)


def _plan_options(schedule: ScheduleConfig, num_ranks: int) -> dict[str, Any]:
    """The keyword arguments of `plan`. Raises PlanError or ConfigError."""
    costs = _rank_costs(schedule)
    shape: dict[str, Any] = {"placement": schedule.placement, "stages_per_rank": schedule.stages_per_rank}
    check_shape(schedule.name, num_ranks, **shape)
    num_stages = num_ranks * stages_per_rank(schedule.name, **shape)
    limit = read_memory_limit(schedule.memory_limit, costs)
    options = {"costs": costs.per_stage(num_stages, num_ranks), "memory_limit": limit, **shape}
    return options | {"num_slices": schedule.num_slices}


@contextmanager
def _naming_file(key: str, path: str, writer: str) -> Iterator[None]:
    """writer: the command that writes such a file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}={path}: {error.strerror}; {writer} writes such a file") from error
    except PlanError as error:
        raise ConfigError(f"{key}: {error}") from error  # which names the file


def _read_costs(path: str) -> RankCosts:
    with _naming_file("schedule.costs", path, "zbpp measure"):
        return read_costs(path)[0]


def costs_of(schedule: ScheduleConfig, timetable: Timetable) -> Costs:
    """The times in schedule.costs, or else F, B and W of equal length."""
    return _rank_costs(schedule).per_stage(timetable.num_stages, timetable.num_ranks)


def _rank_costs(schedule: ScheduleConfig) -> RankCosts:
    """The costs in schedule.costs, or equal ones; of sequences in slices, if schedule.slices cuts them."""
    costs = RankCosts() if schedule.costs is None else _read_costs(schedule.costs)
    given = schedule.slices
    if isinstance(given, list):
        given = checked_bounds(given, name=_SLICES)
    if schedule.num_slices == 1:
        return costs
    return costs.sliced(given if isinstance(given, tuple) else balanced_shares(given, costs))


def slice_bounds_of(config: TrainConfig, timetable: Timetable) -> tuple[int, ...]:
    """The tokens at which the slices of a timetable begin, and the length of a sequence; () without slices.

    A number in schedule.slices leaves the bounds to the costs: those in schedule.costs, or computed ones of
    the model's stages. With parallel.context they are multiples of its degree. Raises ConfigError for data
    that such slices don't fit.
    """
    if isinstance(config.schedule.slices, list):
        return bounds_for(timetable, config.schedule.slices, name=_SLICES)
    if timetable.num_slices == 1:
        return ()
    from zbpp.prediction.stage_memory import computed_costs  # imports torch's fake tensors: seconds

    length, computed = computed_costs(config, timetable)
    measured = None if config.schedule.costs is None else _read_costs(config.schedule.costs)
    costs = computed if measured is None or measured.quadratic is None else measured
    with naming(f"schedule.slices={timetable.num_slices}"):
        return tuple(balanced_bounds(timetable.num_slices, length, costs, config.parallel.context))


def messages_ahead_of(config: TrainConfig, timetable: Timetable, costs: Costs) -> int:
    """parallel.messages_ahead, or as many as the links of these costs need."""
    chosen = config.parallel.messages_ahead
    return messages_ahead(timetable, costs) if chosen is None else chosen


def chooses_messages_ahead(config: TrainConfig) -> bool:
    """Whether the run chooses them once more, when it has measured its links."""
    return config.parallel.messages_ahead is None and config.schedule.replan is not None


def memory_limit_of(schedule: ScheduleConfig) -> MemoryLimit:
    """The limit in schedule.memory_limit, in the unit of the costs."""
    return read_memory_limit(schedule.memory_limit, _rank_costs(schedule))


def shape_of(schedule: ScheduleConfig) -> tuple[int, int] | None:
    """(rows, tokens of a row) of the microbatch that schedule.costs hold for; None: not known."""
    return None if schedule.costs is None else _read_costs(schedule.costs).shape


def build_offload(config: TrainConfig, costs: Costs) -> ActivationOffload | None:
    """The offload of memory.offload; None for none. Raises ConfigError for costs that it can't plan with."""
    gib: Any = config.memory.offload  # the config has checked it
    if gib == "none":
        return None
    with naming(f"memory.offload={gib}"):
        return ActivationOffload(costs, gib)


def build_replan(
    config: TrainConfig,
    timetable: Timetable,
    loss_fn: Callable[..., Any],
    stages: Mapping[int, nn.Module],
    extras: Iterable[Extra],
) -> Replan | None:
    """The Replan that plans schedule.replan for the same cut after the first steps; None if it names none.

    extras: of the pipeline.
    """
    name, limits = config.schedule.replan, config.memory.limits(timetable.num_ranks)
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

    ahead = next((each for each in extras if isinstance(each, MessagesAhead)), None)
    return Replan(
        plan=plan_again,
        loss_fn=loss_fn,
        stages=stages,
        memory_limits=limits,
        timeout=config.parallel.timeout,
        ahead=ahead if chooses_messages_ahead(config) else None,
    )


def _check_replan(name: str | None) -> None:
    """Raise ConfigError for a schedule to switch to that does not exist."""
    if name is not None:
        with naming("schedule.replan"):
            check_name(name)


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
    first = schedule.name if schedule.timetable is None else Path(schedule.timetable).stem
    return Title(str(schedule.replan), replanned_from=first) if is_replanned else Title(first)


def note_on_microbatches(timetable: Timetable, costs: Costs) -> str:
    """What it costs to have fewer microbatches than ranks; "" for as many or more."""
    num_ranks, number = timetable.num_ranks, timetable.num_microbatches
    if number >= num_ranks:
        return ""
    rate = simulate(timetable, costs).bubble_rate
    return (
        f"num_microbatches={number} on {num_ranks} ranks: a rank is idle for {100 * rate:.0f} % of a step "
        f"(simulated); {2 * num_ranks} or more, of a smaller microbatch_size, have a smaller bubble"
    )


def plan_from_file(schedule: ScheduleConfig, num_ranks: int, num_microbatches: int | None) -> Timetable:
    """The plan in schedule.timetable, in any form that `zbpp plan` writes.

    num_microbatches: None: as many as the plan has. A file leaves nothing to plan, so the schedule's options
    must be None. Raises PlanError or ConfigError.
    """
    file = schedule.timetable
    assert file is not None  # the caller has asked
    for option, value in {**schedule.options, "costs": schedule.costs}.items():
        if value is not None:
            raise PlanError(f"{file} is a plan already: leave schedule.{option}={value} out")
    with _naming_file("schedule.timetable", file, "zbpp plan"):
        timetable = read_timetable(file)
    if not all(np.isin(row.ops, (Op.W, Op.BW)).any() for row in timetable.rows):
        raise PlanError(f"{file} is no plan to train by: a rank has no W and no BW")
    if timetable.num_ranks != num_ranks:
        raise PlanError(
            f"{file} is a plan for {timetable.num_ranks} ranks, not for {num_ranks}: write "
            f"-n {timetable.num_ranks}, or torchrun --nproc-per-node {timetable.num_ranks} (times replicate, "
            "shard and tensor)"
        )
    if schedule.slices is not None and schedule.num_slices != timetable.num_slices:
        raise PlanError(
            f"{file} is a plan for {timetable.num_slices} slices, not for schedule.slices={schedule.slices}"
        )
    if num_microbatches not in (None, timetable.num_microbatches):
        raise PlanError(
            f"{file} is a plan for {timetable.num_microbatches} microbatches, not for "
            f"num_microbatches={num_microbatches}: leave num_microbatches out"
        )
    return timetable

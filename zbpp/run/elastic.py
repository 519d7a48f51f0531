"""Adapts a config to another number of processes: other degrees, the same batch.

The number of processes alone decides, so all ranks choose alike. Wishes, the most important one first: each
process holds no larger part of the model than before, or as little more as possible; the degrees of tensor
and shard stay; the pipeline keeps its length. So replicas are given up first, then stages. With fewer parts
of the data there are more microbatches: num_microbatches x replicate x shard, and with it the batch, stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from zbpp.builders.model import build_model
from zbpp.builders.plan import check_layers, check_plan
from zbpp.builders.stages import pipeline_ranks
from zbpp.config import NUM_MICROBATCHES, ConfigError, ParallelConfig, TrainConfig
from zbpp.schedule import PlanError


class Degrees(NamedTuple):
    """How the processes of a job are divided; `pipeline` x the others is their number."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int

    @property
    def parts_of_model(self) -> int:
        """Into how many parts the weights are divided."""
        return self.pipeline * self.shard * self.tensor


def adapted(
    config: TrainConfig, settings: dict[str, Any], num_processes: int
) -> tuple[TrainConfig, dict[str, Any], str]:
    """(the config for so many processes, its values by dotted key, what has changed or nothing).

    Without parallel.elastic nothing changes. With `-n` the config's number of processes is that of this
    start; then only the degrees say what the config was written for. Raises ConfigError if no degrees fit.
    """
    parallel = config.parallel
    wanted = None if parallel.num_processes == num_processes else parallel.num_processes
    product = parallel.replicate * parallel.shard * parallel.tensor
    is_as_written = wanted is None and num_processes % product == 0
    if not parallel.elastic or is_as_written:
        return config, settings, ""
    if wanted is not None:
        pipeline_ranks(parallel, wanted)  # refuses degrees that do not fit the number in the config either
    before = Degrees(max((wanted or 0) // product, 1), parallel.replicate, parallel.shard, parallel.tensor)
    num_microbatches = config.num_microbatches or NUM_MICROBATCHES
    if config.schedule.timetable is not None:
        raise ConfigError(
            f"parallel.elastic=true: {num_processes} processes are left, and schedule.timetable="
            f"{config.schedule.timetable} is a plan for another number of ranks: name a schedule instead"
        )
    degrees = _first_that_fits(config, before, num_processes, num_microbatches)
    rows = num_microbatches * before.replicate * before.shard
    new: dict[str, Any] = {
        "parallel.num_processes": parallel.num_processes and num_processes,
        "parallel.replicate": degrees.replicate,
        "parallel.shard": degrees.shard,
        "parallel.tensor": degrees.tensor,
        "num_microbatches": rows // (degrees.replicate * degrees.shard),
    }
    old = {**settings, "num_microbatches": num_microbatches}
    changes = [f"{key}={value} (was {old[key]})" for key, value in new.items() if value != old[key]]
    if wanted and degrees.pipeline != before.pipeline:
        changes.insert(1, f"{degrees.pipeline} pipeline ranks (were {before.pipeline})")
    text = f"parallel.elastic: {', '.join(changes)}"
    return _with_degrees(config, degrees, num_processes, rows), {**settings, **new}, text


def _first_that_fits(
    config: TrainConfig, before: Degrees, num_processes: int, num_microbatches: int
) -> Degrees:
    """The best degrees under which the model can be cut and the schedule planned. Raises ConfigError."""
    model = build_model(config.model, config.seed, config.finetune)
    rows, why = num_microbatches * before.replicate * before.shard, ""
    for degrees in sorted(_possible(before, num_processes), key=_rank_by(before)):
        data_parts = degrees.replicate * degrees.shard
        if rows % data_parts:
            continue
        try:
            check_layers(model, config.schedule, degrees.pipeline)
            check_plan(config.schedule, degrees.pipeline, rows // data_parts)
        except (ConfigError, PlanError) as error:
            why = why or f"; with {degrees.pipeline} pipeline ranks: {error}"
        else:
            return degrees
    raise ConfigError(
        f"parallel.elastic=true: no degrees up to replicate={before.replicate}, shard={before.shard}, "
        f"tensor={before.tensor} divide {num_processes} processes and keep the batch{why}: start "
        "another number"
    )


def _possible(before: Degrees, num_processes: int) -> Iterator[Degrees]:
    for replicate in range(1, before.replicate + 1):
        for shard in range(1, before.shard + 1):
            for tensor in (each for each in range(1, before.tensor + 1) if before.tensor % each == 0):
                product = replicate * shard * tensor
                if num_processes % product == 0:
                    yield Degrees(num_processes // product, replicate, shard, tensor)


def _rank_by(before: Degrees) -> Callable[[Degrees], tuple[float, ...]]:
    def key(degrees: Degrees) -> tuple[float, ...]:
        growth = max(1.0, before.parts_of_model / degrees.parts_of_model)
        lost = before.tensor - degrees.tensor, before.shard - degrees.shard
        return (growth, *lost, abs(math.log(degrees.pipeline / before.pipeline)), -degrees.replicate)

    return key


def _with_degrees(config: TrainConfig, degrees: Degrees, num_processes: int, rows: int) -> TrainConfig:
    parallel: ParallelConfig = replace(
        config.parallel,
        num_processes=num_processes,
        replicate=degrees.replicate,
        shard=degrees.shard,
        tensor=degrees.tensor,
    )
    return replace(config, parallel=parallel, num_microbatches=rows // (degrees.replicate * degrees.shard))

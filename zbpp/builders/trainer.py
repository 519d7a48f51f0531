"""The trainer's parts from their parts of the config: pipeline, optimizer, learning rate, replanning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.config import OptimizerConfig, ParallelConfig
from zbpp.planning import placement_of, plan
from zbpp.runtime import Pipeline
from zbpp.schedule import Costs, Timetable
from zbpp.training.master_weights import MasterWeights
from zbpp.training.optimizer import adamw, warmup_cosine
from zbpp.training.precision import Precision
from zbpp.training.replan import Replan

Stages = dict[int, nn.Module]


def build_pipeline(
    stages: Stages,
    timetable: Timetable,
    loss_fn: Callable[..., Any],
    seed: int,
    parallel: ParallelConfig,
    mesh: DeviceMesh | None = None,
) -> Pipeline:
    """This rank's part of the pipeline. Collective."""
    return Pipeline(
        stages,
        timetable,
        loss_fn,
        mesh=mesh,
        seed=seed,
        timeout=parallel.timeout,
        dynamic_shapes=parallel.dynamic_shapes,
    )


def build_masters(pipeline: Pipeline, precision: Precision) -> MasterWeights | None:
    """The master weights of a mixed precision, once the copies of each parameter have the same values."""
    return MasterWeights(pipeline.parameters(), precision.compute) if precision.is_mixed else None


def build_optimizer(parameters: Iterable[nn.Parameter], options: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters, those of this rank's part of the pipeline."""
    return adamw(
        parameters,
        learning_rate=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        kahan_sum=options.kahan_sum,
    )


def learning_rate_factor(options: OptimizerConfig, num_steps: int) -> Callable[[int], float]:
    """The factor on the learning rate at each step."""
    return partial(
        warmup_cosine, num_steps=num_steps, warmup_steps=options.warmup_steps, min_ratio=options.min_ratio
    )


def build_replan(
    name: str | None,
    limit: float | None,
    timetable: Timetable,
    loss_fn: Callable[..., Any],
    stages: Stages,
) -> Replan | None:
    """The Replan that plans schedule `name` for the same cut after the first steps; None if name is None.

    limit: GiB that each rank may hold; None: as much as under `timetable`.
    """
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

    return Replan(
        plan=plan_again,
        loss_fn=loss_fn,
        stages=stages,
        memory_limit=None if limit is None else limit * 2**30,
    )

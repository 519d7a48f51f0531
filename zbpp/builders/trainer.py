"""The trainer's parts from their parts of the config: pipeline, master weights, validation, replanning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from zbpp.config import OptimizerConfig, ParallelConfig
from zbpp.planning import placement_of, plan
from zbpp.runtime import ActivationOffload, Extra, Pipeline
from zbpp.runtime.parallel.fully_shard import Reshard
from zbpp.runtime.parallel.mesh import SHARD
from zbpp.schedule import Costs, Timetable
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.optim.post_validated_update import Validation
from zbpp.training.optim.precision import Precision
from zbpp.training.replan import Replan

Stages = dict[int, nn.Module]


def build_pipeline(
    stages: Stages,
    timetable: Timetable,
    loss_fn: Callable[..., Any],
    seed: int,
    parallel: ParallelConfig,
    precision: Precision,
    mesh: DeviceMesh | None,
    offload: ActivationOffload | None = None,
    extras: Sequence[Extra] = (),
) -> Pipeline:
    """This rank's part of the pipeline. Collective.

    In a mixed precision the weights of shards are cast by FSDP2's policy, instead of by MasterWeights.
    """
    policy = None
    if parallel.shard > 1 and precision.is_mixed:
        policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=precision.stored)
    return Pipeline(
        stages,
        timetable,
        loss_fn,
        mesh=mesh,
        reshard=cast(Reshard, parallel.reshard),
        mp_policy=policy,
        seed=seed,
        timeout=parallel.timeout,
        dynamic_shapes=parallel.dynamic_shapes,
        extras=[*([] if offload is None else [offload]), *extras],
    )


def build_masters(pipeline: Pipeline, precision: Precision) -> MasterWeights | None:
    """The master weights of a mixed precision; else None.

    Call this after build_pipeline, which gives all copies of a parameter the same float32 values. Shards need
    no masters: they are float32 themselves, and FSDP2 casts the weights that it gathers from them.
    """
    if not precision.is_mixed or pipeline.place.size(SHARD) > 1:
        return None
    return MasterWeights(pipeline.parameters(), precision.compute)


def build_validation(options: OptimizerConfig) -> Validation | None:
    """How updates are validated after they are made; None: they wait for the norm."""
    if options.validation == "before":
        return None
    return Validation(after=options.validation_after)


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

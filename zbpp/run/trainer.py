"""The pipeline of a run and the trainer over it, from the run's config."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from zbpp.config import TrainConfig, naming
from zbpp.data import Data
from zbpp.data.token_batches import TokenBatches
from zbpp.features.experts.overlap_exchange import OverlapExchange
from zbpp.features.fewer_bytes.codes import Form
from zbpp.features.fewer_bytes.fewer_bytes import FewerBytes
from zbpp.features.graphs import CudaGraphs
from zbpp.features.head_at_once.head_at_once import HeadAtOnce
from zbpp.features.messages_ahead.messages_ahead import MessagesAhead
from zbpp.planning import MemoryLimit
from zbpp.run.callbacks import build_own_callbacks
from zbpp.run.data import limit_evaluation
from zbpp.run.model import metrics_of
from zbpp.run.optimizer import build_masters, build_scheduler, learning_rate_factor, optimizer_of
from zbpp.run.plan import build_offload, build_replan, chooses_messages_ahead, messages_ahead_of
from zbpp.run.stages import Parts
from zbpp.runtime import Extra, Pipeline
from zbpp.runtime.processes.mesh import MeshPosition, Reshard
from zbpp.schedule import Costs, Timetable
from zbpp.stage_api import check_pipeline
from zbpp.training.length_plans import LengthPlanner
from zbpp.training.optim.host_threads import update_on_all_cores
from zbpp.training.optim.precision import PRECISIONS, LossScale
from zbpp.training.trainer import Trainer


class Plan(NamedTuple):
    """What rank 0 has decided for all ranks. costs: those in schedule.costs, or equal F, B and W.

    shape: (rows, tokens of a row) of the microbatch that the costs hold for; None: not known.
    recomputed: with memory.recompute=auto, the numbers of the stages that recompute. slice_bounds: as in
    Pipeline. memory_limit: that in schedule.memory_limit.
    """

    timetable: Timetable
    costs: Costs
    recomputed: frozenset[int] = frozenset()
    shape: tuple[int, int] | None = None
    slice_bounds: tuple[int, ...] = ()
    memory_limit: MemoryLimit = None


def build_pipeline(
    config: TrainConfig,
    plan: Plan,
    model: Any,
    stages: dict[int, nn.Module],
    mesh: DeviceMesh | None = None,
    extras: Sequence[Extra] = (),
) -> Pipeline:
    """This rank's part of the pipeline, with the extras that the config switches on. Collective.

    In a mixed precision the weights of shards are cast by FSDP2's policy, instead of by MasterWeights.
    """
    parallel, precision = config.parallel, PRECISIONS[config.precision]
    policy = None
    switched: list[Extra] = []
    if parallel.shard > 1 and precision.is_mixed:
        # Layers cast their inputs themselves (give_dtypes): data keep their values.
        dtypes = {"param_dtype": precision.compute, "reduce_dtype": precision.stored}
        policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    offload = build_offload(config, plan.costs)
    if offload is not None:
        switched.append(offload)
    if config.memory.head_at_once:
        switched.append(HeadAtOnce())
    if parallel.overlap_exchange:
        switched.append(OverlapExchange())
    number = messages_ahead_of(config, plan.timetable, plan.costs)
    if number or chooses_messages_ahead(config):
        switched.append(MessagesAhead(number))
    if parallel.messages != "exact":
        switched.append(FewerBytes(cast(Form, parallel.messages), parallel.message_boundaries))
    if config.cuda_graphs:
        switched.append(CudaGraphs())
    with naming("model"):
        pipeline = Pipeline(
            stages,
            plan.timetable,
            precision.widened(model.loss),
            mesh=mesh,
            slice_bounds=plan.slice_bounds,
            reshard=cast(Reshard, parallel.reshard),
            mp_policy=policy,
            seed=config.seed,
            timeout=parallel.timeout,
            dynamic_shapes=parallel.dynamic_shapes,
            extras=[*switched, *extras],
        )
        check_pipeline(model, pipeline)
    return pipeline


def build_planner(data: Data, plan: Plan, place: MeshPosition) -> LengthPlanner | None:
    """The planner of batches of so many tokens, on a rank that reads them; else None."""
    if not isinstance(data.train, TokenBatches):
        return None
    return LengthPlanner(
        data.train,
        plan.timetable,
        plan.costs,
        plan.shape,
        memory_limit=plan.memory_limit,
        part=place.data_part,
        num_parts=place.num_data_parts,
    )


def build_trainer(config: TrainConfig, parts: Parts, plan: Plan, pipeline: Pipeline) -> Trainer:
    """The trainer over the pipeline, with its optimizer. Collective."""
    precision, memory, optimizer = PRECISIONS[config.precision], config.memory, config.optimizer
    # After the pipeline, which gives all copies of a parameter the same float32 values.
    masters = build_masters(pipeline, precision)
    release = memory.gradient_release
    is_released = release != "off"
    made = optimizer_of(pipeline, optimizer, masters, is_released)
    if memory.offload_weights:
        update_on_all_cores(made)
    sizes = pipeline.place.num_data_parts, plan.timetable.num_microbatches * config.microbatch_size
    loss_fn: Callable[..., Any] = precision.widened(parts.model.loss)
    with naming("optimizer"):  # what an update does not go with
        return Trainer(
            pipeline=pipeline,
            optimizer=made,
            data=limit_evaluation(parts.data, config.evaluate_every, config.evaluation_batches, *sizes),
            learning_rate=learning_rate_factor(optimizer, config.steps),
            scheduler=build_scheduler(made, optimizer),
            clip_norm=optimizer.clip_norm,
            evaluate_every=config.evaluate_every,
            record_every=config.measure_every,
            callbacks=build_own_callbacks(config),
            metrics=metrics_of(parts.model, precision),
            replan=build_replan(config, plan.timetable, loss_fn, parts.stages, pipeline.extras),
            links=plan.costs.links,
            masters=masters,
            loss_scale=LossScale() if precision.is_scaled else None,
            gradient_release=is_released,
            accumulate=release == "accumulate",
            per_parameter=optimizer.per_parameter,
            post_validation=optimizer.validation == "after",
            planner=build_planner(parts.data, plan, pipeline.place),
            non_finite=config.non_finite,
        )

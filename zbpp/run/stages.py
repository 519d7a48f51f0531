"""Prepare this rank's stages before the first step: device and dtype, recompute, compile; and the mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.loss import _Loss

from zbpp.autograd import recompute
from zbpp.config import ParallelConfig, TrainConfig, naming
from zbpp.data import Data
from zbpp.data.token_batches import TokenBatches
from zbpp.features.context.sequence_parts import sequence_part
from zbpp.features.experts.experts import spread_experts
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.run.model import check_data_fit, check_lengths_may_differ
from zbpp.runtime.call.microbatch import into_microbatches
from zbpp.runtime.call.sequence_lengths import SequenceLengths
from zbpp.runtime.processes.mesh import MeshPosition, check_expert_degree, make_mesh, num_pipeline_ranks
from zbpp.runtime.processes.tensor_parallel import parallelize
from zbpp.runtime.processes.ties import TiedStages, agree_on_ties
from zbpp.schedule import Timetable
from zbpp.stage_api import blocks_of
from zbpp.training.batches import batch_for, part_for
from zbpp.training.fine_tuned import FineTuned
from zbpp.training.optim.precision import PRECISIONS, Precision, give_dtypes


class Parts(NamedTuple):
    """The model, this rank's stages of it by number, and the data."""

    model: Any
    stages: dict[int, nn.Module]
    data: Data


def prepare_stages(
    config: TrainConfig,
    parts: Parts,
    timetable: Timetable,
    mesh: DeviceMesh | None,
    device: torch.device,
    recomputed: Collection[int] = (),
    slice_bounds: Sequence[int] = (),
) -> Parts:
    """Move, split and tie the stages, try the data on them, then have them recompute or compile. Collective.

    Returns the parts with TiedStages. recomputed: with memory.recompute=auto, the stages that recompute.
    slice_bounds: as in Pipeline.
    """
    (model, stages, data), place = parts, MeshPosition(mesh)
    with naming("parallel"):
        spread_experts(stages.values(), place)  # before they are moved: the device need not hold all
    move_stages(stages, device, PRECISIONS[config.precision], stay_on_host=config.memory.offload_weights)
    move_loss(model, device, PRECISIONS[config.precision].stored)
    with naming("model"):
        parallelize(model, stages, place.mesh)
        ties = agree_on_ties(stages, timetable.rank_of, place, model)
    if config.memory.offload_weights:
        with naming("memory.offload_weights=true"):
            OffloadedWeights(stages, device)
    with naming("data"):
        for inputs in first_inputs(data, stages, timetable, device):
            _check_sequences(inputs, slice_bounds)
            if inputs and (context := config.parallel.context) > 1:  # as F gets it; nothing is exchanged yet
                inputs = sequence_part(inputs, inputs[0].shape[1], 0, context)
            check_data_fit(stages, inputs)
        if data.is_shared:
            check_lengths_may_differ(stages)
    recompute_stages(stages, config.memory.recompute, recomputed)
    compile_stages(stages, config.compile, config.memory.budget)
    return parts._replace(stages=TiedStages(stages, ties))


def first_inputs(
    data: Data, stages: Mapping[int, nn.Module], timetable: Timetable, device: torch.device
) -> Iterator[Sequence[Any]]:
    """Inputs of stage 0: of the first microbatch, or of two that differ in length."""
    if not isinstance(data.train, TokenBatches):
        args, _ = batch_for(stages, timetable.num_stages, data.train, 0, device)
        yield [into_microbatches("the input", arg, timetable.num_microbatches)[0] for arg in args]
        return
    cut = data.train.cut(0, timetable.num_microbatches)
    for group, _ in (cut[0], cut[-1]):
        yield part_for(stages, timetable.num_stages, data.train.microbatch(group), device)[0]


def _check_sequences(inputs: Sequence[Any], slice_bounds: Sequence[int]) -> None:
    """Raise ConfigError for inputs of a microbatch that these slices don't fit."""
    with naming("schedule.slices"):
        named = {f"input {i}": each for i, each in enumerate(inputs)}
        SequenceLengths(1, slice_bounds).find(named)


def move_stages(
    stages: Mapping[int, nn.Module], device: torch.device, precision: Precision, *, stay_on_host: bool = False
) -> None:
    """Give the stages the dtypes that the precision stores, and move them to a device.

    stay_on_host: the stages are left on the CPU, though they will compute on `device`.
    """
    for stage in stages.values():
        give_dtypes(stage, precision)  # first: the device need not hold wider values
        stage.to("cpu" if stay_on_host else device)


def move_loss(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Move what a model's loss may read: its attributes that are tensors or losses of torch (class weights).

    dtype: of the output that the loss gets; floating-point tensors are cast to it.
    """
    if isinstance(model, FineTuned):
        return move_loss(model.model, device, dtype)
    for name, value in list(getattr(model, "__dict__", {}).items()):
        if isinstance(value, _Loss):
            value.to(device, dtype)
        elif type(value) is Tensor:
            setattr(model, name, value.to(device, dtype if value.is_floating_point() else None))


def recompute_stages(
    stages: Mapping[int, nn.Module], what: str, chosen: Collection[int] | None = None
) -> None:
    """Let B recompute activations. `what`: "none", "block" (each block by itself) or "stage".

    "auto": the blocks of the stages in `chosen`.
    """
    for index, stage in stages.items():
        name = ("block" if index in (chosen or ()) else "none") if what == "auto" else what
        modules = {"none": [], "block": list(blocks_of(stage)), "stage": [stage]}[name]
        for module in modules:
            recompute(module)


def compile_stages(stages: Mapping[int, nn.Module], what: str, budget: float) -> None:
    """Let the stages be compiled in their first F. `what`: "none", "stage" or "layer" (each layer by itself).

    Layers that are alike are compiled once. budget: the share of the activations to keep between F and B.
    """
    if what == "none":
        return
    from zbpp.autograd.compiled import SplitCache, compile_stage  # imports the compiler: seconds

    cache: SplitCache = {}
    for index, stage in stages.items():
        compile_stage(
            stage,
            whole=what == "stage",
            budget=budget,
            name=f"stage {index}",
            cache=cache,
            say=partial(print, flush=True),
        )


# ----------------------------------------------------------------
# The mesh of a run from its config, and stages split over its tensor dimension.


def pipeline_ranks(parallel: ParallelConfig, num_processes: int) -> int:
    """How many ranks each pipeline has. Raises ConfigError if the degrees don't divide `num_processes`."""
    degrees = _degrees(parallel)
    with naming("parallel"):
        check_expert_degree(**degrees, expert=parallel.expert)
        return num_pipeline_ranks(num_processes, **degrees)


def build_mesh(parallel: ParallelConfig, device_type: str) -> DeviceMesh | None:
    """The mesh; None if all degrees are 1: then the pipeline stands alone. Collective."""
    degrees = _degrees(parallel)
    if set(degrees.values()) == {1}:
        return None
    return make_mesh(**degrees, expert=parallel.expert, device_type=device_type)


def _degrees(parallel: ParallelConfig) -> dict[str, int]:
    names = "replicate", "shard", "context", "tensor"
    return {name: getattr(parallel, name) for name in names}

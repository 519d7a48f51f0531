"""Makes what a Pipeline needs of what it is given: a timetable of a schedule's name, stages of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from zbpp.error_text import kind_of
from zbpp.planning import plan
from zbpp.runtime.extra import brought_by
from zbpp.runtime.parallel.mesh import Place, planned_by_rank_0
from zbpp.runtime.parallel.tensor_parallel import parallelize
from zbpp.schedule import Timetable
from zbpp.stage_api import PipelineModel


def timetable_of(timetable: Timetable | str | None, num_microbatches: int | None, place: Place) -> Timetable:
    """The timetable itself, or the plan of that name for the ranks of a pipeline.

    Raises TypeError or ValueError for arguments that don't determine a timetable, PlanError if there is no
    such plan.
    """
    if isinstance(timetable, Timetable):
        if num_microbatches not in (None, timetable.num_microbatches):
            raise ValueError(
                f"num_microbatches={num_microbatches}, but the timetable has {timetable.num_microbatches}: "
                "leave num_microbatches out, or plan for it"
            )
        return timetable
    if not isinstance(timetable, str):
        found = "no timetable was given" if timetable is None else f"got {type(timetable).__name__}"
        raise TypeError(
            f'a Pipeline needs a timetable, {found}: write Pipeline({{0: module}}, "zb_h1", '
            'num_microbatches=8, loss_fn=...); a zbpp.plan("zb_h1", ...) may stand in place of the name'
        )
    if num_microbatches is None:
        raise ValueError(
            f'Pipeline(stages, "{timetable}") does not say num_microbatches: add num_microbatches=8'
        )
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"torchrun started {os.environ['WORLD_SIZE']} processes, but there is no process group, so each "
            "would train by itself: call torch.distributed.init_process_group first, or give a timetable "
            "for one rank"
        )
    num_ranks = dist.get_world_size(place.pipeline) if dist.is_initialized() else 1
    return planned_by_rank_0(partial(plan, timetable, num_ranks, num_microbatches), place)


def rank_in(group: dist.ProcessGroup | None, timetable: Timetable) -> int:
    """This process's rank in the pipeline. Raises ValueError if the group doesn't fit the timetable."""
    if timetable.num_ranks == 1 and group is None:
        return 0
    if not dist.is_initialized():
        raise ValueError(
            f"the timetable is for {timetable.num_ranks} ranks, but there is no process group: start the job "
            "with torchrun and call torch.distributed.init_process_group, or plan for one rank"
        )
    size = dist.get_world_size(group)
    if size != timetable.num_ranks:
        raise ValueError(f"the timetable is for {timetable.num_ranks} ranks, the process group has {size}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the process group that it was given for the pipeline")
    return rank


def model_of(stages: object) -> PipelineModel | None:
    """The model that was given in place of stages, or None."""
    if isinstance(stages, Mapping | type) or not isinstance(stages, PipelineModel):
        return None
    return stages


def built_stages(
    model: PipelineModel, indices: Iterable[int], num_stages: int, device: torch.device, place: Place
) -> dict[int, nn.Module]:
    """{stage index: module} of these stages, on `device`, split over the mesh's tensor dimension.

    Raises ValueError if the model can't build or split one.
    """
    stages: dict[int, nn.Module] = {}
    for index in indices:
        call = f"build_stage({index}, {num_stages}) of {type(model).__name__}"
        try:
            stage = model.build_stage(index, num_stages)
        except Exception as error:
            raise ValueError(f"{call} raised {type(error).__name__}: {error}") from error
        if not isinstance(stage, nn.Module):
            raise ValueError(f"{call} returned {kind_of(stage)}, not a torch.nn.Module: is a return missing?")
        stages[index] = stage.to(device)
    parallelize(model, stages, place.mesh)
    return stages


def device_for_messages(group: dist.ProcessGroup | None) -> torch.device:
    """This process's CUDA device if the group is NCCL's, else the CPU."""
    if dist.is_initialized() and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_of(stages: Iterable[nn.Module], group: dist.ProcessGroup | None) -> torch.device:
    """Where the stages' tensors are; for stages without any, where the group's messages go."""
    stages = [*stages]
    for extra in brought_by(stages):
        device: torch.device | None = getattr(extra, "device", None)  # where it puts the stages' tensors
        if device is not None:
            return device
    tensors = (tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers()))
    first = next(tensors, None)
    return device_for_messages(group) if first is None else first.device

"""Can a pipeline drive a stage that the user has wrapped in fully_shard?"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.runtime.processes.mesh import (
    DIMENSIONS,
    EXPERT,
    EXPERT_COPIES,
    REPLICATE,
    SHARD,
    TENSOR,
    MeshPosition,
    is_taken,
    names_in,
)

_PLAIN = "give the Pipeline the plain stage, which it wraps itself: Pipeline(..., mesh=mesh)"


def refusal_of(stage: nn.Module, place: MeshPosition) -> str:
    """Why a stage that is wrapped in fully_shard can't be driven in this mesh; "" if it can."""
    if not any(map(is_fully_sharded, stage.modules())):
        return ""
    if not place.has(SHARD):
        return (
            "is wrapped in FSDP2 (fully_shard), and the pipeline has no shards: write "
            "Pipeline(..., mesh=zbpp.make_mesh(shard=2)), and fully_shard(stage, mesh=mesh['shard']) if the "
            "Pipeline is not to wrap it"
        )
    if not is_fully_sharded(stage):
        return (
            "has parts that are wrapped in FSDP2, but is not wrapped itself: write fully_shard(stage, "
            f"mesh=mesh['shard']) after its parts, or {_PLAIN}"
        )
    for name, parameter in stage.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None and parameter.requires_grad:
            return (
                f"is wrapped in FSDP2 without its parameter {name}, whose gradients nobody reduces: {_PLAIN}"
            )
        if mesh is not None and not _lies_on(mesh, place):
            return (
                f"is wrapped in FSDP2 on another mesh than the pipeline's ({name} lies on "
                f"{mesh}): write fully_shard(stage, mesh=mesh['shard']) with the Pipeline's mesh, "
                f"mesh['replicate', 'shard'] if it has replicas, or {_PLAIN}"
            )
    return ""


def is_fully_sharded(module: object) -> bool:
    """Whether the module was given to fully_shard. Found by its class's name, so that nothing is imported."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _lies_on(mesh: DeviceMesh, place: MeshPosition) -> bool:
    """Whether each dimension of a parameter's mesh has the processes of that dimension of the pipeline's.

    A mesh that `take_as` has named may have some of them: FSDP2 reduces a user's experts by itself.
    """
    names = names_in(mesh)
    groups = dict(zip(names, mesh.get_all_groups(), strict=True)) if names else {}
    if names == (EXPERT_COPIES, EXPERT):
        compared: tuple[str, ...] = names
    elif SHARD in names and set(names) <= set(DIMENSIONS):
        compared = (REPLICATE, SHARD, *({TENSOR} & set(names) if not is_taken(mesh) else ()))
    else:
        return False
    pairs = [(_ranks(groups.get(name)), _ranks(place.group(name))) for name in compared]
    return all(set(own) <= set(whole) if is_taken(mesh) else own == whole for own, whole in pairs)


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)

"""What the runtime asks of DTensors, the tensors that lie on a pipeline's mesh (mesh.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from zbpp.devices import carried
from zbpp.runtime.processes.mesh import EXPERT, EXPERT_COPIES, SHARD, MeshPosition, names_in


def dimensions_of(tensor: torch.Tensor) -> Mapping[str, Any]:
    """{dimension: placement} of a DTensor, {} of any other tensor.

    Raises ValueError for a mesh whose dimensions have no names.
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return {}
    names = names_in(mesh)
    if not names:
        raise ValueError(
            "a parameter lies on a DeviceMesh whose dimensions have no names: name them as the pipeline's "
            "mesh does, mesh_dim_names=('shard',) for fully_shard"
        )
    return dict(zip(names, tensor.placements, strict=True))  # type: ignore[attr-defined]


def is_split(placement: Any) -> bool:
    """Whether a placement of a DTensor is Shard: each process along that dimension has another part."""
    return placement is not None and hasattr(placement, "dim")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether FSDP2 has split the tensor: over the dimension "shard", experts over "expert_copies"."""
    placements = dimensions_of(tensor)
    return any(is_split(placements.get(name)) for name in (SHARD, EXPERT_COPIES))


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds the experts of this process, which has others in the dimension "expert"."""
    return is_split(dimensions_of(tensor).get(EXPERT))


def is_counted(tensor: torch.Tensor, place: MeshPosition) -> bool:
    """Whether this process counts its part of a parameter where all parts are added up, as for a norm.

    Along a dimension that does not split the parameter, all processes hold the same values: there the first
    process alone counts them.
    """
    placements = dimensions_of(tensor)
    names = (EXPERT_COPIES, EXPERT) if EXPERT in placements else place.dimensions_of_parts
    return all(place.coordinate(name) == 0 for name in names if not is_split(placements.get(name)))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor: its local tensor, in the same memory. Any other tensor as it is."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether FSDP2 has freed the tensor's memory: it does so by giving the storage no bytes."""
    local = local_of(tensor)
    return local.layout is torch.strided and local.numel() > 0 and local.untyped_storage().nbytes() == 0


def copy_from(source: int, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Give a tensor the values that it has on process `source` of the group. Collective over the group.

    If it is a DTensor, this process's part gets the values of `source`'s part. A tensor that has the values
    already is left alone: it does not count as changed in place.
    """
    local = local_of(tensor.detach())
    sent = carried(local.contiguous().clone(), group)
    dist.broadcast(sent, group=group, group_src=source)
    values = sent.to(local.device)
    if not torch.equal(values, local):
        local.copy_(values)


def copy_to_replicas(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give each tensor the values that it has on the group's first process. Collective over the group."""
    for tensor in tensors:
        copy_from(0, tensor, group)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, gathered from its mesh; any other tensor as it is. Collective over the mesh."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def part_for(own: Any, whole: Any) -> Any:
    """What to load into `own` from the value `whole` of a state dict.

    This process's part of `whole` as a DTensor, if `own` is a DTensor and `whole` is none; else `whole`.
    """
    if (
        not isinstance(whole, torch.Tensor)
        or not hasattr(own, "device_mesh")
        or hasattr(whole, "device_mesh")
    ):
        return whole
    part = whole
    # From the innermost dimension outwards: FSDP2 shards the parts that tensor parallelism has made.
    for dimension, placement in reversed([*enumerate(own.placements)]):
        if is_split(placement):
            parts = part.chunk(own.device_mesh.size(dimension), placement.dim)
            number = own.device_mesh.get_local_rank(dimension)
            part = parts[number] if number < len(parts) else part.narrow(placement.dim, 0, 0)
    return like(own, part.to(own.device))


def like(whole: Any, local: torch.Tensor) -> torch.Tensor:
    """This process's part as a DTensor with the mesh, placements and shape of `whole`.

    Returns the part itself if `whole` is a plain tensor.
    """
    if not hasattr(whole, "device_mesh"):
        return local
    from torch.distributed.tensor import DTensor  # lazily: it imports sympy

    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )

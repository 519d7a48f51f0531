"""Which stages FSDP2 shards: plain ones are wrapped here, wrapped ones are checked.

A mesh with a dimension "shard" has all its stages sharded: each block by itself, the rest of the stage with
the stage. With "replicate" beside it, FSDP2 shards over the one and replicates over the other (HSDP).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.runtime.blocks import blocks_of
from zbpp.runtime.fully_shard import RESHARD, FullyShardedStage, Reshard
from zbpp.runtime.mesh import DIMENSIONS, REPLICATE, SHARD, TENSOR, Place, copy_to_replicas, is_fully_sharded

_PLAIN = "give the Pipeline the plain stage, which it wraps itself: Pipeline(..., mesh=mesh)"


def shard_stages(
    stages: Mapping[int, nn.Module], place: Place, rank: int, reshard: Reshard, policy: Any = None
) -> dict[int, FullyShardedStage]:
    """{index: the stage as a FullyShardedStage}; {} if the mesh has no shards. Collective over the mesh.

    Plain stages are wrapped in fully_shard here. Before that, all processes that see different data get the
    values of the first of them. rank: for error messages. policy: a MixedPrecisionPolicy. Raises ValueError
    on every process if one of them can't drive its stages.
    """
    if reshard not in RESHARD:
        raise ValueError(f"reshard={reshard!r}: write one of {', '.join(RESHARD)}")
    if SHARD not in place.groups:
        if policy is not None:
            raise ValueError(
                "mp_policy is for stages that FSDP2 shards, and the mesh has no shards: write "
                "mesh=zbpp.make_mesh(shard=2), or leave mp_policy out"
            )
        return {}
    plain = {index: stage for index, stage in stages.items() if not is_fully_sharded(stage)}
    for stage in plain.values():
        for name in (SHARD, REPLICATE):
            if name in place.groups:
                copy_to_replicas((*stage.parameters(), *stage.buffers()), place.groups[name])
    sharded, refusal = {}, ""
    try:
        for index, stage in stages.items():
            if index in plain:
                _check_optimizers(stage)
                _wrap(stage, _data_mesh(place), policy)
            what = f"rank {rank}, reducing the gradients of stage {index} over its shards"
            sharded[index] = FullyShardedStage(stage, reshard, place, what)
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:  # what FSDP2 raises
        refusal = f"stage {index} can't be sharded: {error}"
    for each in place.gather(refusal):
        if each:
            raise ValueError(each)
    return sharded


def _data_mesh(place: Place) -> DeviceMesh:
    """The dimensions of the mesh that FSDP2 works on: shard, and replicate if there are replicas."""
    assert place.mesh is not None
    mesh: DeviceMesh = place.mesh[(REPLICATE, SHARD) if REPLICATE in place.groups else (SHARD,)]
    return mesh


def _check_optimizers(stage: nn.Module) -> None:
    """Raise ValueError if an optimizer holds the parameters that FSDP2 is about to replace."""
    ids = set(map(id, stage.parameters()))
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer) and any(
            id(parameter) in ids for group in each.param_groups for parameter in group["params"]
        ):
            raise ValueError(
                f"an optimizer ({type(each).__name__}) was made of its parameters, which shards replace, and "
                "would train nothing: make the optimizer after the Pipeline, of pipeline.parameters()"
            )


def _wrap(stage: nn.Module, mesh: DeviceMesh, policy: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # lazily: it imports sympy

    for name, parameter in stage.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} has hooks, which the sharded parameter in its place would not have: make the "
                "Pipeline first, then register hooks on its parameters()"
            )
        if not parameter.is_contiguous():
            raise ValueError(
                f"{name} is not contiguous (channels-last?), and FSDP2 shards contiguous parameters only: "
                "write parameter.data = parameter.data.contiguous() before the Pipeline is made"
            )
    if any(type(module.forward).__name__ == "CompiledForward" for module in stage.modules()):
        raise ValueError(
            "it is compiled, and FSDP2's hooks would leave it eager: write compile=none, or replicate= "
            "instead of shard="
        )
    for module in (*_blocks_with_own_parameters(stage), stage):
        fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())


def _blocks_with_own_parameters(stage: nn.Module) -> Iterator[nn.Module]:
    """The blocks that share no parameter with another part of the stage: FSDP2 would make two of it."""
    places = Counter(id(each) for _, each in stage.named_parameters(remove_duplicate=False))
    for block in dict.fromkeys(blocks_of(stage)):
        inside = Counter(id(each) for _, each in block.named_parameters(remove_duplicate=False))
        if inside and all(places[each] == count for each, count in inside.items()):
            yield block


def refusal_of(stage: nn.Module, place: Place) -> str:
    """Why a stage that is wrapped in fully_shard can't be driven in this mesh; "" if it can."""
    if not any(map(is_fully_sharded, stage.modules())):
        return ""
    if SHARD not in place.groups:
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


def _lies_on(mesh: DeviceMesh, place: Place) -> bool:
    """Whether each dimension of a parameter's mesh has the processes of that dimension of the pipeline's."""
    names = mesh.mesh_dim_names or ()
    if not set(names) <= set(DIMENSIONS):
        return False
    return all(
        _ranks(mesh.get_group(name) if name in names else None) == _ranks(place.groups.get(name))
        for name in (REPLICATE, SHARD)
    ) and (TENSOR not in names or _ranks(mesh.get_group(TENSOR)) == _ranks(place.groups.get(TENSOR)))


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)

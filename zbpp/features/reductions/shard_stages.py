"""Which stages FSDP2 shards: plain ones are wrapped in fully_shard, wrapped ones are checked.

A mesh with a dimension "shard" has all its stages sharded: each block by itself, the rest of the stage with
the stage. With "replicate" beside it, FSDP2 shards over the one and replicates over the other (HSDP). Spread
experts (experts.py) are wrapped by themselves, and sharded over the processes that have the same experts.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import filterfalse
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.features.reductions.fully_shard import FullyShardedStage
from zbpp.job.agreement import refuse_together
from zbpp.runtime.processes.dtensors import copy_to_replicas, is_spread
from zbpp.runtime.processes.mesh import (
    EXPERT_COPIES,
    REPLICATE,
    RESHARD,
    SHARD,
    MeshPosition,
    Reshard,
    experts_mesh,
)
from zbpp.runtime.processes.wrapped_stages import is_fully_sharded
from zbpp.stage_api import blocks_of, declared_dtypes


def shard_stages(
    stages: Mapping[int, nn.Module], place: MeshPosition, rank: int, reshard: Reshard, policy: Any = None
) -> dict[int, FullyShardedStage]:
    """{index: the stage as a FullyShardedStage}; {} without a dimension "shard". Collective over the mesh.

    Plain stages are wrapped in fully_shard here. Before that, all processes that see different data get the
    values of the first of them. rank: for error messages. policy: a MixedPrecisionPolicy. Raises ValueError
    on every process if one of them can't drive its stages.
    """
    if reshard not in RESHARD:
        raise ValueError(f"reshard={reshard!r}: write one of {', '.join(RESHARD)}")
    if SHARD not in place.groups and policy is not None:
        raise ValueError(
            "mp_policy is for stages that FSDP2 shards, and the mesh has no shards: write "
            "mesh=zbpp.make_mesh(shard=2), or leave mp_policy out"
        )
    if not place.has(SHARD):
        return {}
    if (
        SHARD not in place.groups
    ):  # the dimension has one process: FSDP2 may hold the weights, as for its policy
        stages = {index: stage for index, stage in stages.items() if is_fully_sharded(stage)}
    plain = {index: stage for index, stage in stages.items() if not is_fully_sharded(stage)}
    for stage in plain.values():
        tensors = [*stage.parameters(), *stage.buffers()]
        for name in place.divided_over("step"):
            copy_to_replicas(filterfalse(is_spread, tensors), place.groups[name])
        if EXPERT_COPIES in place.expert_groups:
            copy_to_replicas(filter(is_spread, tensors), place.expert_groups[EXPERT_COPIES])
    sharded, refusal = {}, ""
    try:
        for index, stage in stages.items():
            if index in plain:
                _wrap(stage, place, policy)
            what = f"rank {rank}, reducing the gradients of stage {index} over its shards"
            sharded[index] = FullyShardedStage(stage, reshard, place, what)
    except (ValueError, TypeError, AssertionError, RuntimeError) as error:  # what FSDP2 raises
        refusal = f"stage {index} can't be sharded: {error}"
    refuse_together(refusal, place.gather)
    return sharded


def _wrap(stage: nn.Module, place: MeshPosition, policy: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # lazily: it imports sympy

    if any(type(module.forward).__name__ == "CompiledForward" for module in stage.modules()):
        raise ValueError(
            "it is compiled, and FSDP2's hooks would leave it eager: write compile=none, or replicate= "
            "instead of shard="
        )
    # In an evaluation, torch's linear returns a view.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPHead\) returned a view")
    assert place.mesh is not None
    mesh: DeviceMesh = place.mesh[(REPLICATE, SHARD) if REPLICATE in place.groups else (SHARD,)]
    policy = policy or MixedPrecisionPolicy()
    blocks = [*_blocks_with_own_parameters(stage)]
    # What modules inside get and return is cast by the block around them.
    inside = replace(policy, cast_forward_inputs=False, output_dtype=None)
    for module in _experts_in(stage):
        for child in blocks_of(module):  # copies, as outside of the experts
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=mesh, mp_policy=inside)
        _wrap_experts(module, place, inside)
    kept = [*_kept_in_float32(stage, policy.param_dtype)]
    for module in kept:
        fully_shard(module, mesh=mesh, mp_policy=replace(inside, param_dtype=None))
    for module in (*blocks, stage):
        if module not in kept:
            fully_shard(module, mesh=mesh, mp_policy=policy)


def _kept_in_float32(stage: nn.Module, param_dtype: torch.dtype | None) -> Iterator[nn.Module]:
    """The modules whose weights stay in float32 where the others compute in 16 bits."""
    weights = {name: each for name, each in stage.named_parameters() if each.is_floating_point()}
    dtypes = (each.dtype for each in weights.values())
    computes = param_dtype or min(dtypes, key=lambda each: each.itemsize, default=torch.float32)
    if computes.itemsize != 2:
        return
    declared = declared_dtypes(stage, computes)
    kept = {name for name, each in weights.items() if each.dtype == declared[name] == torch.float32}
    for path in dict.fromkeys(name.rpartition(".")[0] for name in sorted(kept)):
        module = stage.get_submodule(path)
        inside = {f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters()}
        if beside := sorted(inside & weights.keys() - kept):
            raise ValueError(
                f"{path} keeps a weight in float32, beside {beside[0]} in 16 bits, and FSDP2 casts all "
                "weights of a module alike: write replicate= instead of shard="
            )
        yield module


def _experts_in(stage: nn.Module) -> list[nn.Module]:
    """The modules whose own parameters are spread experts. Raises ValueError if two of them share one."""
    found = [each for each in stage.modules() if any(map(is_spread, each.parameters(recurse=False)))]
    places = Counter(parameter for each in found for parameter in each.parameters(recurse=False))
    if max(places.values(), default=0) > 1:
        raise ValueError(
            "two layers share a parameter of their experts, which FSDP2 would make two of: share the whole "
            "module, or write replicate= instead of shard="
        )
    return found


def _wrap_experts(module: nn.Module, place: MeshPosition, policy: Any) -> None:
    """Dimension 0 of their parameters is the expert: FSDP2 splits dimension 1, which it divides evenly.

    A parameter with one dimension has no other one to split.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    experts = experts_mesh(place.mesh)
    assert experts is not None
    fully_shard(
        module,
        mesh=experts[EXPERT_COPIES],
        shard_placement_fn=lambda parameter: Shard(min(1, parameter.dim() - 1)),
        mp_policy=policy,
    )


def _blocks_with_own_parameters(stage: nn.Module) -> Iterator[nn.Module]:
    """The blocks that share no parameter with another part of the stage: FSDP2 would make two of it."""
    places = Counter(id(each) for _, each in stage.named_parameters(remove_duplicate=False))
    for block in dict.fromkeys(blocks_of(stage)):
        inside = Counter(id(each) for _, each in block.named_parameters(remove_duplicate=False))
        if inside and all(places[each] == count for each, count in inside.items()):
            yield block

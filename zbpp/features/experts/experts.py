"""Experts of one layer that are spread over processes, which exchange their tokens' rows.

A module with an `Exchange` (zbpp/autograd/models/exchange.py) holds stacked experts: the first dimension of
each of its own parameters is the expert. Of n processes each gets the n-th part of them, in order, as a
DTensor with Shard(0) on the mesh's dimension "expert". So a norm, a checkpoint and an optimizer see the
parameter whole, as they do under tensor parallelism. With shards, FSDP2 then takes the part as it takes all
other parameters (fully_shard.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zbpp.autograd.models.exchange import BalancedExchange, Exchange
from zbpp.features.all_to_all import AllToAll
from zbpp.job.agreement import gather_or_refuse
from zbpp.runtime.extra import Feature
from zbpp.runtime.processes.dtensors import is_spread
from zbpp.runtime.processes.groups import close_groups, group_like
from zbpp.runtime.processes.mesh import EXPERT, MeshPosition, experts_mesh, names_in
from zbpp.runtime.rank import Rank


def spread_experts(stages: Iterable[nn.Module], place: MeshPosition) -> None:
    """Spread the experts of these stages over the mesh's dimension "expert", if it has one. Collective.

    Stages that are spread already stay as they are. Raises ValueError on every process, before anything is
    changed, for stages without experts, and for a number of experts that can't be divided.
    """
    mesh = experts_mesh(place.mesh)
    if mesh is None:
        return
    holders = [holder for stage in stages for holder in _holders(stage)]
    num = place.size(EXPERT)
    if not any(gather_or_refuse(_refusal(holders, num), bool(holders), place.gather)):
        raise ValueError(no_experts(num))
    _take_parts(holders, mesh[EXPERT])
    for holder in holders:
        _connect(holder, place.expert_groups[EXPERT])


def as_if_spread(stage: nn.Module, mesh: DeviceMesh | None) -> bool:
    """Let a stage hold a process's part of the experts, and exchange nothing: to measure memory with.

    Returns whether it has experts. Raises ValueError as `spread_experts` does.
    """
    part_mesh, holders = experts_mesh(mesh), list(_holders(stage))
    if part_mesh is None:
        return bool(holders)
    if refusal := _refusal(holders, part_mesh[EXPERT].size()):
        raise ValueError(refusal)
    _take_parts(holders, part_mesh[EXPERT])
    for holder in holders:
        for name, child in holder.named_children():
            if isinstance(child, Exchange):
                setattr(holder, name, BalancedExchange(part_mesh[EXPERT].size()))
    return bool(holders)


def _take_parts(holders: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Holders that share a parameter share its part."""
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for holder in holders:
        for name, parameter in holder.named_parameters(recurse=False, remove_duplicate=False):
            if not is_spread(parameter):
                part = parts[parameter] if parameter in parts else _part(parameter, mesh)
                parts[parameter] = part
                setattr(holder, name, part)


def has_experts(stages: Iterable[nn.Module]) -> bool:
    """Whether a stage has experts that can be spread."""
    return any(True for stage in stages for _ in _holders(stage))


def no_experts(num: int) -> str:
    """The error message for a model whose stages have no experts."""
    return (
        f"expert={num}, but no stage has experts that can be spread: write expert=1, or for llama "
        "model.experts=8"
    )


def _holders(stage: nn.Module) -> Iterator[nn.Module]:
    """The modules that hold an Exchange, each once."""
    for module in stage.modules():
        if any(True for _ in _exchanges(module)):
            yield module


def _exchanges(holder: nn.Module) -> Iterator[Exchange]:
    return (child for child in holder.children() if isinstance(child, Exchange))


def _refusal(holders: Iterable[nn.Module], num: int) -> str:
    for holder in holders:
        for name, parameter in holder.named_parameters(recurse=False):
            if len(parameter) % num:
                return (
                    f"expert={num} does not divide the {len(parameter)} experts of {type(holder).__name__}: "
                    f"write an expert= that divides {len(parameter)}"
                )
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and not is_spread(parameter):
                return (
                    f"{type(holder).__name__}.{name} is split over another dimension: write expert=1, or let "
                    "the Pipeline shard the plain stage"
                )
            if mesh is not None and mesh.size(names_in(mesh).index(EXPERT)) != num:
                return (
                    f"expert={num}, but {type(holder).__name__}.{name} is spread over another number already"
                )
    return ""


def _part(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    from torch.distributed.tensor import DTensor, Shard  # lazily: it imports sympy

    part = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _connect(holder: nn.Module, group: dist.ProcessGroup) -> None:
    for exchange in _exchanges(holder):
        exchange.transfer = AllToAll(group, type(holder).__name__)
        exchange.num_processes = dist.get_world_size(group)


class ExpertParallel(Feature):
    """Spreads the experts of a pipeline's stages, and lets them exchange rows over a group of its own."""

    name = "expert_parallel"
    excludes = MappingProxyType(
        {
            "post_validation": "a step may begin again on some processes only; leave one of them out",
            "cuda_graphs": "the sizes of exchanges differ from call to call; leave one of them out",
        }
    )

    def attach(self, rank: Rank) -> None:
        """See Extra. Raises ValueError on every process for stages whose experts can't be spread."""
        stages = [worker.module for worker in rank.workers.values()]
        spread_experts(stages, rank.place)
        # If this process fails, those that wait for its rows stop waiting when the group closes.
        self._group = group_like(rank.place.expert_groups[EXPERT], rank.timeout)
        self._holders = [holder for stage in stages for holder in _holders(stage)]
        self._between = rank.place.expert_groups[EXPERT]
        for holder in self._holders:
            _connect(holder, self._group)

    def close(self) -> None:
        """See Extra. Stages that are used without the pipeline exchange over the mesh's group."""
        for holder in self._holders:
            _connect(holder, self._between)
        close_groups([self._group])
        del self._group

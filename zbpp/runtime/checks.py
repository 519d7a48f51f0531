"""What a Pipeline is made of, checked before anything runs: what one rank finds wrong, every rank raises."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from zbpp.planning import plan
from zbpp.runtime.agree import planned_by_rank_0
from zbpp.runtime.parameters import names_of, refuse_tied_across_ranks, tied_of
from zbpp.runtime.world import check_agreement, gather, unheard_name
from zbpp.schedule import Timetable

# torch's class -> the user's name for it. Found by name among a module's bases, so that nothing is imported.
_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DDP": "replicate()",
    "FSDPModule": "FSDP2 (fully_shard)",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
}


@dataclass(frozen=True)
class Agreed:
    """What every rank knows of all. names: per rank, {stage: its names}; key: unheard of in this job."""

    names: list[dict[int, list[str]]]
    key: str


@dataclass(kw_only=True)
class _Card:
    """What one rank tells the others of its stages."""

    refusal: str = ""
    stages: list[int] = field(default_factory=list)
    names: dict[int, list[str]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    key: str = field(default_factory=unheard_name)


def timetable_of(
    timetable: Timetable | str | None, num_microbatches: int | None, group: dist.ProcessGroup | None
) -> Timetable:
    """The timetable itself, or the plan of that name for the group's ranks."""
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
    num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    return planned_by_rank_0(partial(plan, timetable, num_ranks, num_microbatches), group)


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


def check_ranks_agree(timetable: Timetable, dynamic_shapes: bool, group: dist.ProcessGroup | None) -> None:
    """Raise AgreementError on every rank unless all were given the same."""
    digest = hashlib.sha256(str(timetable).encode()).hexdigest()[:16]
    check_agreement("pipelines", {"dynamic_shapes": dynamic_shapes, "timetable (by hash)": digest}, group)


def check_stages(
    stages: Mapping[int, nn.Module], timetable: Timetable, group: dist.ProcessGroup | None
) -> Agreed:
    """Every rank looks at all stages, and raises: none is left waiting for one that went away."""
    cards: list[_Card] = gather(_card(stages), group)
    for rank, card in enumerate(cards):
        if card.refusal:
            raise ValueError(f"rank {rank}: {card.refusal}" if len(cards) > 1 else card.refusal)
        expected = timetable.stages_of(rank)
        if card.stages != expected:
            raise ValueError(
                f"rank {rank} owns stages {expected} of this timetable, got modules for {card.stages}"
            )
    names = [card.names for card in cards]
    refuse_tied_across_ranks([card.tied for card in cards], names)
    return Agreed(names, cards[0].key)


def _card(stages: Any) -> _Card:
    refusal = _refusal(stages)
    if refusal:
        return _Card(refusal=refusal)
    try:
        return _Card(stages=sorted(stages), names=names_of(stages), tied=tied_of(stages))
    except ValueError as error:
        return _Card(refusal=str(error))


def _refusal(stages: Any) -> str:
    """Why these can't be the stages of a rank, or nothing."""
    if not isinstance(stages, Mapping):
        return (
            f"stages is a {type(stages).__name__}: write Pipeline({{stage index: module}}, ...) with the "
            "stages that this rank owns; a whole model on one rank is {0: model}"
        )
    for index, module in stages.items():
        if type(index) is not int or not isinstance(module, nn.Module):
            return (
                f"stages has {index!r}: {type(module).__name__}; a key is a stage's index, an int from 0, "
                "and its value a torch.nn.Module"
            )
        wrapped = next(filter(None, map(_wrapper_of, module.modules())), "")
        if wrapped:
            return (
                f"stage {index} is wrapped in {wrapped}, whose reductions expect a plain backward pass: "
                "gradients would be wrong. Give the Pipeline the plain module; to train replicas, average "
                "`.grad` after step() with torch.distributed.all_reduce"
            )
    return ""


def _wrapper_of(module: nn.Module) -> str:
    bases = (base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch."))
    return next((_WRAPPERS[base] for base in bases if base in _WRAPPERS), "")

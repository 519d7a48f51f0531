"""Parameters that several stages share.

On one rank that works: the stages hold one Parameter, which is trained once. On several ranks each would
train a copy of its own, and the copies would drift apart: such a model is refused.

A model may declare its ties (`tied_parameters`, see zbpp/stage_api.py). Of one that declares nothing, rank 0
builds all stages, one after the other and on the meta device, and compares identities.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zbpp.runtime.world import broadcast, gather


class Place(NamedTuple):
    """Where a parameter is. identity: equal for places of one rank that are one Parameter."""

    stage: int
    name: str
    rank: int
    identity: int = 0

    def __str__(self) -> str:
        return f"{self.name} of stage {self.stage}"


def check_ties(model: Any, stages: Mapping[int, nn.Module], rank_of: Sequence[int], is_rank_0: bool) -> None:
    """Raise ValueError on every rank if stages of different ranks share a parameter. Collective.

    stages: this rank's, built. rank_of: the rank of each stage. Raises it, too, for a declared tie that the
    stages don't have.
    """
    if len(set(rank_of)) == 1:
        return
    declared = getattr(model, "tied_parameters", None)
    if declared is None:
        found = shared_parameters(model.build_stage, len(rank_of)) if is_rank_0 else []
        for pair in broadcast(found):
            _check_rank(*(Place(stage, name, rank_of[stage]) for stage, name in pair))
        return
    mine = [
        Place(index, name, rank_of[index], id(parameter))
        for index, stage in stages.items()
        for name, parameter in stage.named_parameters(remove_duplicate=False)
    ]
    everywhere = [place for places in gather(mine) for place in places]
    for names in declared:
        for one, other in combinations(_places(names, everywhere), 2):
            _check_rank(one, other)
            if one.identity != other.identity:
                raise ValueError(
                    f"tied_parameters={declared}: {one} and {other} are two Parameters; let build_stage give "
                    "both stages the same one"
                )


def shared_parameters(
    build_stage: Callable[[int, int], nn.Module], num_stages: int
) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    """Pairs of (stage, name) that are one Parameter; [] also for a model that can't be built on meta.

    To be called after the stages that are needed: a model may keep what it builds.
    """
    # One stage at a time is alive: a Parameter that another stage shares is kept by the model.
    seen: dict[int, tuple[Any, tuple[int, str]]] = {}
    found = []
    with warnings.catch_warnings(), torch.random.fork_rng([]), torch.device("meta"), _OnMeta():
        warnings.simplefilter("ignore")
        for index in range(num_stages):
            try:
                stage = build_stage(index, num_stages)
            except Exception:  # it works on real tensors; what it shares it has to declare
                return []
            for name, parameter in stage.named_parameters():
                known, place = seen.get(id(parameter), (None, (index, name)))
                if known is not None and known() is parameter:
                    found.append((place, (index, name)))
                else:
                    seen[id(parameter)] = ref(parameter), (index, name)
    return found


class _OnMeta(TorchFunctionMode):
    """What names a device itself gets the meta device, too."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs))


def _places(names: Sequence[str], everywhere: Sequence[Place]) -> Iterator[Place]:
    for name in names:
        places = [place for place in everywhere if place.name == name]
        if not places:
            raise ValueError(f"tied_parameters names {name!r}, which no stage has: write a parameter's name")
        yield from places


def _check_rank(one: Place, other: Place) -> None:
    if one.rank != other.rank:
        raise ValueError(
            f"{one} and {other} are one parameter, but ranks {one.rank} and {other.rank} would train a copy "
            "each: choose a schedule that puts both stages on one rank (zb_v does with the first and the "
            "last), or give each stage a parameter of its own"
        )

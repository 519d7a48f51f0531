"""Parameters that several stages share: declared by a stage, named by the model, or found.

Stages of one rank hold one Parameter, which is trained once. Stages of different ranks hold a copy each. The
copies start equal, their gradients are summed in every step (tied_gradients.py), and so they stay equal.

Who says what is tied:
- a stage: `stage.tied_parameters = {"head.weight": "embedding.weight"}`, in names of the whole model;
- a model: `tied()` returns such a mapping for all its stages;
- nobody, if a model's stages share a Parameter object: rank 0 builds all stages on the meta device, one after
  the other, and compares identities.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from zbpp.runtime.world import broadcast

Place = tuple[int, str]
"""A stage, and a name in it."""
Tie = tuple[Place, ...]
"""All places of one parameter; the first one's rank owns it."""
Declared = Mapping[str, str | Place]
"""{name of a parameter of a stage: the name, or the place, of the parameter that it is tied to}."""


def declare_ties(
    model: Any,
    stages: Mapping[int, nn.Module],
    num_stages: int,
    *,
    is_rank_0: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write into each stage's `tied_parameters` what the model says or shares. Collective over the group.

    stages: this rank's, built by the model. Stages of this rank that hold copies get one Parameter.
    """
    named: dict[str, str] = dict(model.tied()) if hasattr(model, "tied") else {}
    pairs = shared_parameters(model.build_stage, num_stages) if is_rank_0 and num_stages > 1 else []
    for first, (stage, name) in broadcast(pairs, group):
        if stage in stages:
            _declare(stages[stage], name, first)
    for index, stage in stages.items():
        for name in _names(stage) & named.keys():
            if named[name] not in _names(stage):
                _declare(stages[index], name, named[name])
    _unite(stages)


def _declare(stage: nn.Module, name: str, other: str | Place) -> None:
    known: Declared = getattr(stage, "tied_parameters", None) or {}
    if name not in known:
        stage.tied_parameters = {**known, name: other}  # type: ignore[assignment]  # a plain attribute


def _unite(stages: Mapping[int, nn.Module]) -> None:
    """Give stages of one rank that declare copies of a parameter the same Parameter."""
    for index, stage in stages.items():
        for name, other in declared_by(stage).items():
            for owner in (stages[each] for each in _owners(other, stages) if each != index):
                module, _, leaf = name.rpartition(".")
                other_name = other if isinstance(other, str) else other[1]
                setattr(stage.get_submodule(module), leaf, owner.get_parameter(other_name))


def _owners(other: str | Place, stages: Mapping[int, nn.Module]) -> list[int]:
    if isinstance(other, str):
        return [index for index, stage in stages.items() if other in _names(stage)]
    return [other[0]] if other[0] in stages else []


def _names(stage: nn.Module) -> set[str]:
    return {name for name, _ in stage.named_parameters(remove_duplicate=False)}


def declared_by(stage: nn.Module) -> Declared:
    """The stage's `tied_parameters`."""
    return dict(getattr(stage, "tied_parameters", None) or {})


def ties_between(
    declared: Sequence[Mapping[int, Declared]], all_names: Sequence[Mapping[int, Iterable[str]]]
) -> list[Tie]:
    """The ties of all ranks, each with its places in order.

    declared: per rank, {stage: what it declares}. all_names: per rank, `names_of` its stages. Raises
    ValueError for a declaration that names no parameter, or more than one.
    """
    known: dict[str, list[Place]] = {}
    for names in all_names:
        for index in names:
            for name in names[index]:
                known.setdefault(name, []).append((index, name))
    ties: list[set[Place]] = []
    for index, name, other in _rows(declared):
        joined = {(index, name), _resolved(index, name, other, known)}
        ties, apart = [], ties
        for tie in apart:
            if tie & joined:
                joined |= tie
            else:
                ties.append(tie)
        ties.append(joined)
    return sorted(tuple(sorted(tie)) for tie in ties)


def _rows(declared: Sequence[Mapping[int, Declared]]) -> list[tuple[int, str, str | Place]]:
    return [
        (index, name, other)
        for stages in declared
        for index, ties in stages.items()
        for name, other in ties.items()
    ]


def _resolved(index: int, name: str, other: str | Place, known: Mapping[str, list[Place]]) -> Place:
    """The place that stage `index` declares its parameter `name` to be tied to."""
    if not isinstance(other, str):
        return other[0], other[1]
    places = [place for place in known.get(other, []) if place != (index, name)]
    if not places:
        raise ValueError(f"stage {index} declares {name} to be tied to {other}, which no other stage has")
    if len(places) > 1:
        stages = ", ".join(str(stage) for stage, _ in places)
        raise ValueError(
            f"stage {index} declares {name} to be tied to {other}, which stages {stages} have: write the "
            f"stage too, {{{name!r}: ({places[0][0]}, {other!r})}}"
        )
    return places[0]


def shared_parameters(
    build_stage: Callable[[int, int], nn.Module], num_stages: int
) -> list[tuple[Place, Place]]:
    """Pairs of places that have one Parameter; [] also for a model that can't be built on meta.

    To be called after the stages that are needed: a model may keep what it builds.
    """
    # Only one stage at a time is alive. A Parameter that a later stage has, too, is kept alive by the model.
    seen: dict[int, tuple[Any, Place]] = {}
    found = []
    with warnings.catch_warnings(), torch.random.fork_rng([]), torch.device("meta"), _OnMeta():
        warnings.simplefilter("ignore")
        for index in range(num_stages):
            try:
                stage = build_stage(index, num_stages)
            except Exception:  # the model needs real tensors: it has to declare what its stages share
                return []
            for name, parameter in stage.named_parameters():
                known, place = seen.get(id(parameter), (None, (index, name)))
                if known is not None and known() is parameter:
                    found.append((place, (index, name)))
                else:
                    seen[id(parameter)] = ref(parameter), (index, name)
    return found


class _OnMeta(TorchFunctionMode):
    """Code that names a device itself gets the meta device instead."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs))

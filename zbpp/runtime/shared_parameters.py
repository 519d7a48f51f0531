"""Parameters that a model's stages share: found by building all stages on the meta device, one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

ParameterPlace = tuple[int, str]
"""(stage, name of a parameter in that stage): one of the places where the model has the parameter."""
Pair = tuple[ParameterPlace, ParameterPlace]


def shared_parameters(
    build_stage: Callable[[int, int], nn.Module], num_stages: int, loss: Any = None
) -> list[Pair]:
    """Pairs of places that have one Parameter; [] also for a model that can't be built on meta.

    loss: if it is a module, its parameters count as those of a stage `num_stages`, behind the last one.
    Call this after the stages that will be trained were built: a model may keep what it builds, here on meta.
    """
    # One stage at a time is alive. A Parameter that a later stage has, too, is kept alive by the model; any
    # other one is freed and may leave its id to a later one, so a weak reference says which one was seen.
    seen: dict[int, tuple[Any, ParameterPlace]] = {}
    found = []
    num_modules = num_stages + 1 if isinstance(loss, nn.Module) else num_stages
    with warnings.catch_warnings(), torch.random.fork_rng([]), torch.device("meta"), _OnMeta():
        warnings.simplefilter("ignore")
        for index in range(num_modules):
            try:
                module = build_stage(index, num_stages) if index < num_stages else loss
            except Exception:  # the model needs real tensors: it has to declare what its stages share
                return []
            for name, parameter in module.named_parameters():
                known, place = seen.get(id(parameter), (None, (index, name)))
                if known is not None and known() is parameter:
                    found.append((place, (index, name)))
                else:
                    seen[id(parameter)] = ref(parameter), (index, name)
    return found


class _OnMeta(TorchFunctionMode):
    """Replaces every device=... in calls of torch by the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs))

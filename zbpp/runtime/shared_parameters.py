"""Parameters that a model's stages share: found by building all stages on the meta device, one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Place = tuple[int, str]
"""A stage, and the name of a parameter in it."""


def shared_parameters(
    build_stage: Callable[[int, int], nn.Module], num_stages: int, loss: Any = None
) -> list[tuple[Place, Place]]:
    """Pairs of places that have one Parameter; [] also for a model that can't be built on meta.

    loss: if it is a module, its parameters count as those of a stage behind the last one.
    To be called after the stages that are needed: a model may keep what it builds.
    """
    # Only one stage at a time is alive. A Parameter that a later stage has, too, is kept alive by the model.
    seen: dict[int, tuple[Any, Place]] = {}
    found = []
    with warnings.catch_warnings(), torch.random.fork_rng([]), torch.device("meta"), _OnMeta():
        warnings.simplefilter("ignore")
        for index in range(num_stages + isinstance(loss, nn.Module)):
            try:
                stage = build_stage(index, num_stages) if index < num_stages else loss
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

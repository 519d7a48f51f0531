"""Parameters that several stages share.

If the stages are on one rank, that works: they hold one Parameter, which is trained once. On several ranks
each would train a copy of its own, and the copies would drift apart: such a model is refused. What a stage
declares in `tied_parameters` is checked in parameters.py. What a model shares without saying so is found
here: rank 0 builds all stages on the meta device, one after the other, and compares identities.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from zbpp.runtime.world import broadcast

Place = tuple[int, str]
"""A stage, and a name in it."""


def check_ties(
    build_stage: Callable[[int, int], nn.Module],
    rank_of: Sequence[int],
    *,
    is_rank_0: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise ValueError on every rank of the group if stages of different ranks share a parameter. Collective.

    rank_of: the rank of each stage. To be called after this rank's stages are built.
    """
    if len(set(rank_of)) == 1:
        return
    for one, other in broadcast(shared_parameters(build_stage, len(rank_of)) if is_rank_0 else [], group):
        ranks = rank_of[one[0]], rank_of[other[0]]
        if ranks[0] != ranks[1]:
            raise ValueError(
                f"{one[1]} of stage {one[0]} and {other[1]} of stage {other[0]} are one parameter, but ranks "
                f"{ranks[0]} and {ranks[1]} would train a copy each: choose a schedule that puts both stages "
                "on one rank (zb_v does with the first and the last), or give each a parameter of its own"
            )


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

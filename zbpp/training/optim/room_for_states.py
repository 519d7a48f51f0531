"""Is there room for what the first step has to allocate for good: gradients and the optimizer's states?

Weights are on their devices before the first step; gradients come with its first W, the optimizer's states
with its update. If these alone don't fit, the run will end out of memory, maybe after a long first forward.
So the ranks say so before the step, with figures. Activations are not counted: a run that passes this check
may still not fit (`zbpp memory` predicts all of its memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from zbpp.job.world import DeviceError
from zbpp.planning.memory_limit import memory_text
from zbpp.runtime.parallel.mesh import local_of
from zbpp.schedule.costs import BYTES

if TYPE_CHECKING:
    from zbpp.training.trainer import Trainer

# Tensors like the parameter that a first step of torch's optimizers allocates.
_STATES = {"Adam": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Adadelta": 2}


class Room(NamedTuple):
    """A rank's bytes: its weights, what the first step adds, and what its device has free (None: unknown)."""

    weights: int
    gradients: int
    states: int
    free: int | None

    @property
    def missing(self) -> int:
        """How many bytes are missing, at the least."""
        return 0 if self.free is None else max(0, self.gradients + self.states - self.free)


def free_bytes(device: torch.device) -> int | None:
    """A CUDA device's free bytes, with those that torch's allocator caches; None for a CPU, which swaps."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept


def check_room(
    trainer: Trainer,
    *,
    weights_on_host: bool = False,
    free: Callable[[torch.device], int | None] | None = None,
) -> None:
    """Raise DeviceError on every rank, with a line for each, if gradients and states can't fit. Collective.

    weights_on_host: whether weights are offloaded. Then gradients and states are on the host, too, and
    nothing is checked. free: a device's free bytes; None: `free_bytes`.
    """
    if weights_on_host:
        return
    rooms = trainer.pipeline.place.gather(_room(trainer, free or free_bytes))
    if any(room.missing for room in rooms):
        raise DeviceError(_report(rooms))


def _room(trainer: Trainer, free: Callable[[torch.device], int | None]) -> Room:
    weights = list(trainer.pipeline.parameters())
    without = (each for each in weights if each.requires_grad and each.grad is None)
    gradients = 0 if trainer.gradient_release != "off" else _bytes(without)
    return Room(_bytes(weights), gradients, _states(trainer.optimizer), free(trainer.pipeline.device))


def _states(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the states that the first update makes; 0 for optimizers that are not torch's."""
    kinds = {base.__name__ for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim")}
    each = max((_STATES[kind] for kind in kinds & _STATES.keys()), default=0)
    total = 0
    for group in optimizer.param_groups:
        has_momentum = "SGD" in kinds and group.get("momentum", 0) != 0
        new = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        total += _bytes(new) * (1 if has_momentum else each)
    return total


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_of(each).nbytes for each in tensors)


def _report(rooms: list[Room]) -> str:
    lines = [
        f"  rank {rank}: weights {_text(room.weights)} (there), gradients {_text(room.gradients)}, optimizer "
        f"states {_text(room.states)}; free {'?' if room.free is None else _text(room.free)}"
        + (f": {_text(room.missing)} too little" if room.missing else "")
        for rank, room in enumerate(rooms)
    ]
    short = sum(1 for room in rooms if room.missing)
    return "\n".join(
        [
            f"too little memory on {short} of {len(rooms)} ranks, before any activation is counted:",
            *lines,
            "start more ranks, shard the weights (parallel.shard), write memory.gradient_release=step or "
            "memory.offload_weights=true, or a narrower precision; `zbpp memory` with the arguments of this "
            "run and memory.limit=GIB lists what makes it fit",
        ]
    )


def _text(amount: int) -> str:
    return memory_text(amount, BYTES)

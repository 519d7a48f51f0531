"""Whether the state of a run may be saved: a checkpoint of NaN weights would replace a good one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zbpp.checkpoints import CheckpointError
from zbpp.runtime.parallel.mesh import local_of

if TYPE_CHECKING:
    from zbpp.training.trainer import Trainer


def check_savable(trainer: Trainer) -> None:
    """Raise CheckpointError, on all processes, for weights that aren't finite or states with NaN. Collective.

    Frozen weights and buffers may hold infinities on purpose (masks), an optimizer's state too.
    """
    for why in trainer.pipeline.place.gather(_fault(trainer)):
        if why:
            raise CheckpointError(f"{why}, so this state is not saved")


@torch.no_grad()
def _fault(trainer: Trainer) -> str:
    named = list(trainer.pipeline.named_parameters())
    trained = [(name, each) for name, each in named if each.requires_grad]
    masters = [] if trainer.masters is None else [(name, trainer.masters.of(each)) for name, each in trained]
    bad = _first(trained, _is_bad) or _first(masters, _is_bad)
    if bad is not None:
        return f"parameter {bad} is NaN or infinite"
    names = {id(each): name for name, each in [*trained, *masters]}
    states = [
        (names.get(id(parameter), "a parameter"), value)
        for parameter, state in trainer.optimizer.state.items()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    bad = _first(states, torch.isnan)
    return "" if bad is None else f"the optimizer's state of {bad} is NaN"


def _is_bad(tensor: Tensor) -> Tensor:
    return ~tensor.isfinite()


def _first(tensors: Iterable[tuple[str, Tensor]], is_bad: Callable[[Tensor], Tensor]) -> str | None:
    """The name of the first tensor with a bad value; None if there is none. One transfer per device."""
    numbers = [(name, local_of(each.detach())) for name, each in tensors if _has_nan(each.dtype)]
    numbers = [(name, each) for name, each in numbers if each.numel()]
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, each in numbers:
        by_device.setdefault(each.device, []).append((name, is_bad(each).any()))
    for flags in by_device.values():
        found = torch.stack([flag for _, flag in flags]).tolist()
        for (name, _), flag in zip(flags, found, strict=True):
            if flag:
                return name
    return None


def _has_nan(dtype: torch.dtype) -> bool:
    """Whether NaN can be looked for: float8 has no isnan."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)

"""An optimizer's step for some of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def is_optimi(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch-optimi's."""
    return type(optimizer).__module__.startswith("optimi.")


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    """The parameters that the optimizer holds now; groups may be added between steps."""
    return (each for group in optimizer.param_groups for each in group["params"])


def update(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Run the optimizer's step for these parameters alone, from their `.grad`."""
    if not (is_optimi(optimizer) and optimizer.defaults["gradient_release"]):
        with _restricted(optimizer, set(map(id, parameters))):
            optimizer.step()
        return
    group_of = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    for each in parameters:
        # After load_state_dict this would be a copy of the group, which learning rate schedules don't change.
        optimizer.state[each]["group"] = group_of[id(each)]
        optimizer.step(param=each)


@contextmanager
def _restricted(optimizer: torch.optim.Optimizer, wanted: set[int]) -> Iterator[None]:
    """Within this context the optimizer's groups hold only the parameters with these ids."""
    whole = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, parameters in whole:
            group["params"] = [each for each in parameters if id(each) in wanted]
        yield
    finally:
        for group, parameters in whole:
            group["params"] = parameters

"""An optimizer's step for some of its parameters, while the others wait for their gradients.

torch's optimizers   param_groups hold only those parameters while `optimizer.step()` runs
torch-optimi's       `optimizer.step(param=...)` for each, as its own gradient release does
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from zbpp.runtime.optimizer_trial import refusal_of_parts


class PartialUpdates(Protocol):
    """Updates parameters of one optimizer, a part at a time."""

    def begin(self) -> None:
        """Called before the first part of a step. Raises ValueError for what the user has made impossible."""

    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update some parameters from their `.grad`. They belong to the optimizer."""

    def finish(self) -> None:
        """Called after the last part of a step."""


class RestrictedGroups:
    """Any torch optimizer whose update of one parameter depends on this parameter alone.

    A hook by `register_step_post_hook` runs once, after the last part. Raises ValueError for an optimizer
    that updates parameters together, and for one that needs a closure.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        refusal = refusal_of_parts(optimizer)
        if refusal:
            raise ValueError(
                f"{type(optimizer).__name__} can't update its parameters in parts: {refusal}. "
                "Write gradient_release=off, or take an optimizer such as torch.optim.AdamW"
            )
        self._optimizer = optimizer

    def begin(self) -> None:
        """Raise ValueError if there are hooks that would see parts where they expect the whole."""
        hooks: Iterable[Any] = (
            self._optimizer._optimizer_step_pre_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        if any(hooks):
            raise ValueError(
                "the optimizer has a step pre-hook, or all optimizers have a step hook, which would run for "
                "each stage, when the gradients of other stages are not complete: remove the hook, use "
                "optimizer.register_step_post_hook, or write gradient_release=off"
            )

    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Run `optimizer.step()` with these parameters alone."""
        with _restricted(self._optimizer, set(map(id, parameters))), _without_post_hooks(self._optimizer):
            self._optimizer.step()

    def finish(self) -> None:
        """Run the step post-hooks, once for all parts."""
        for hook in list(self._optimizer._optimizer_step_post_hooks.values()):
            hook(self._optimizer, (), {})


@contextmanager
def _restricted(optimizer: torch.optim.Optimizer, wanted: set[int]) -> Iterator[None]:
    """Within it the optimizer's groups hold only the parameters with these ids."""
    whole = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, parameters in whole:
            group["params"] = [each for each in parameters if id(each) in wanted]
        yield
    finally:
        for group, parameters in whole:
            group["params"] = parameters


@contextmanager
def _without_post_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    hooks = optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_post_hooks = hooks


class OneByOne:
    """An optimizer of torch-optimi made with gradient_release=True, which counts steps per parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not optimizer.defaults["gradient_release"]:
            name = type(optimizer).__name__
            raise ValueError(
                f"optimi's {name} counts steps for all its parameters together: make it with "
                f"{name}(..., gradient_release=True)"
            )
        self._optimizer: Any = optimizer

    def begin(self) -> None:
        """Refuse step hooks, and let each parameter read its own group's learning rate."""
        optimizer = self._optimizer
        if (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        ):
            raise ValueError(
                "the optimizer has a step hook, which would run once for each parameter: remove the hook, or "
                "write gradient_release=off"
            )
        # load_state_dict leaves copies of the groups here, which a learning rate schedule does not reach.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["group"] = group

    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update one parameter after the other; a parameter without a gradient stays as it is."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._optimizer.step(param=parameter)

    def finish(self) -> None:
        """Nothing is left to do."""


def is_optimi(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch-optimi's."""
    module = sys.modules.get("optimi.optimizer")
    return module is not None and isinstance(optimizer, module.OptimiOptimizer)


def partial_updates(optimizer: torch.optim.Optimizer) -> PartialUpdates:
    """Updates of the optimizer's parameters in parts. Raises ValueError if it can't do that."""
    return OneByOne(optimizer) if is_optimi(optimizer) else RestrictedGroups(optimizer)

"""An optimizer's step for some of its parameters, while the others wait for their gradients.

torch's optimizers           `optimizer.step()`, while param_groups hold only the parameters to update
torch-optimi's optimizers    `optimizer.step(param=...)` for each parameter, as in optimi's gradient release
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
        """Called before the first part of a step. Raises ValueError for hooks that can't run in parts."""

    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update some of the optimizer's parameters from their `.grad`."""

    def finish(self) -> None:
        """Called after the last part of a step."""


class RestrictedGroups:
    """PartialUpdates of any torch optimizer whose update of a parameter depends on that parameter alone.

    The optimizer's step post-hooks run once, after the last part. Raises ValueError for an optimizer whose
    update of one parameter depends on others, and for one that needs a closure.
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
        """Raise ValueError for step hooks that would run for each part instead of once."""
        hooks: Iterable[Any] = (
            self._optimizer._optimizer_step_pre_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
        if any(hooks):
            raise ValueError(
                "there is a step pre-hook of the optimizer, or a global step hook of all optimizers, which "
                "would run for each stage, before the gradients of other stages are complete: remove the "
                "hook, use optimizer.register_step_post_hook, or write gradient_release=off"
            )

    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Run `optimizer.step()` for these parameters alone."""
        with _restricted(self._optimizer, set(map(id, parameters))), _without_post_hooks(self._optimizer):
            self._optimizer.step()

    def finish(self) -> None:
        """Run the step post-hooks, once for all parts."""
        for hook in list(self._optimizer._optimizer_step_post_hooks.values()):
            hook(self._optimizer, (), {})


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


@contextmanager
def _without_post_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    hooks = optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_post_hooks = hooks


class OneByOne:
    """PartialUpdates of an optimizer of torch-optimi, which must be made with gradient_release=True.

    Such an optimizer counts steps per parameter. Raises ValueError for one that was made without it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not optimizer.defaults["gradient_release"]:
            name = type(optimizer).__name__
            raise ValueError(
                f"optimi's {name} counts steps for all its parameters together: make it with "
                f"{name}(..., gradient_release=True)"
            )
        self._optimizer: Any = optimizer

    def begin(self) -> None:
        """Let each parameter read its own group's learning rate. Raises ValueError for step hooks."""
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
        # After load_state_dict these are copies of the groups, which learning rate schedules do not change.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["group"] = group

    def update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update one parameter after the other; a parameter without a gradient stays as it is."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._optimizer.step(param=parameter)

    def finish(self) -> None:
        """Nothing: there are no step hooks to run."""


def is_optimi(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch-optimi's."""
    module = sys.modules.get("optimi.optimizer")
    return module is not None and isinstance(optimizer, module.OptimiOptimizer)


def partial_updates(optimizer: torch.optim.Optimizer) -> PartialUpdates:
    """The PartialUpdates of an optimizer. Raises ValueError if it can't update its parameters in parts."""
    return OneByOne(optimizer) if is_optimi(optimizer) else RestrictedGroups(optimizer)

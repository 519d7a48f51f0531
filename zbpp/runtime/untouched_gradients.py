"""Notices a forward that changes `.grad`, which other microbatches of the step add to.

In which order microbatches add is the schedule's, so a gradient that a forward drops, replaces or changes
would depend on the schedule. Looking takes time for each parameter, so a worker looks in its first step only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class UntouchedGradients:
    """Calls a stage's module; raises RuntimeError if the call has changed a parameter's gradient."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage, self._module = stage, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = [(name, each, _mark(each)) for name, each in self._module.named_parameters()]
        output = self._module(*args, **kwargs)
        changed = [name for name, each, mark in before if _mark(each) != mark]
        if changed:
            raise RuntimeError(
                f"the forward of stage {self._stage} changes the gradient of {', '.join(changed)}, to which "
                "other microbatches add in the schedule's order: change gradients between steps, or in a "
                "hook of the parameter (register_hook)"
            )
        return output


def called(stage: int, module: nn.Module, *, is_first: bool, num_microbatches: int) -> Callable[..., Any]:
    """What a worker calls for the module; with one microbatch a forward may change what it likes."""
    return UntouchedGradients(stage, module) if is_first and num_microbatches > 1 else module


def _mark(parameter: Tensor) -> tuple[int, int, int]:
    """Changes with the gradient: which tensors it is in, and their changes in place."""
    own, main = parameter.grad, getattr(parameter, "main_grad", None)
    return id(own), id(main), sum(each._version for each in (own, main) if each is not None)

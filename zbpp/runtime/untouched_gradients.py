"""Notices a forward that changes `.grad`, which other microbatches of the step add to.

In which order microbatches add is the schedule's, so a gradient that a forward drops, replaces or changes
would depend on the schedule. Looking takes time for each parameter. So a worker looks at all microbatches of
its first step, and at one of each later step: at the first one, then at the second, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import Tensor, nn


class UntouchedGradients:
    """Calls a stage's module; raises RuntimeError if the call has changed a parameter's gradient.

    num_steps: how many have ended. In later steps the parameters are those of the first one, unless one of
    them is gone: to list them takes longer than to look at them.
    """

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage, self._module = stage, module
        self._named: list[tuple[str, ref[Tensor]]] = []
        self.num_steps = 0

    def begin(self, num_microbatches: int) -> tuple[Callable[..., Any], int]:
        """(what a step calls for the module, the microbatch at which it calls this object instead).

        -1: at none. With one microbatch a forward may change what it likes.
        """
        if num_microbatches == 1:
            return self._module, -1
        return (self._module, (self.num_steps - 1) % num_microbatches) if self.num_steps else (self, -1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = self._parameters()
        before = [_mark(each) for _, each in named]
        output = self._module(*args, **kwargs)
        after = [_mark(each) for _, each in named]
        changed = [named[place][0] for place, mark in enumerate(before) if after[place] != mark]
        if changed:
            raise RuntimeError(
                f"the forward of stage {self._stage} changes the gradient of {', '.join(changed)}, to which "
                "other microbatches add in the schedule's order: change gradients between steps, or in a "
                "hook of the parameter (register_hook)"
            )
        return output

    def _parameters(self) -> list[tuple[str, Tensor]]:
        known = [(name, each()) for name, each in self._named]
        found = [(name, each) for name, each in known if each is not None]
        if not self.num_steps or len(found) < len(known):
            found = [*self._module.named_parameters()]
            self._named = [(name, ref(each)) for name, each in found]
        return found


def _mark(parameter: Tensor) -> tuple[int, int, int]:
    """Changes with the gradient: which tensors it is in, and their changes in place."""
    own, main = parameter.grad, getattr(parameter, "main_grad", None)
    return id(own), id(main), sum(each._version for each in (own, main) if each is not None)

"""Optimizer accumulation: each microbatch's gradients go into the optimizer's states, and are dropped.

    2W0  weight a: gradient -> states, dropped; weight b: gradient -> states, dropped; ...
    ...
    2W7  weight a: gradient -> states, weight updated, gradient dropped; ...

So only one parameter's gradient exists at a time. torch-optimi's optimizers support this: with
`optimizer_accumulation` set, their step changes the states and not the weight. Their moving averages treat
each microbatch as a step, and expect the gradient of the microbatch's mean loss. So the factor
1 / num_microbatches, which the pipeline's gradients have, is taken out again. The result only approximates
that of summed gradients, since a beta applies per microbatch. It equals the result of optimi's own
accumulation over the same microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.gradient_release import Done, check_before_step, parameters_of
from zbpp.runtime.partial_updates import OneByOne, is_optimi


class OptimizerAccumulation:
    """A GradientRelease that gives each microbatch's gradients to the optimizer.

    The optimizer gets a leaf's gradient as soon as it is complete.

    parts: {stage: the parameters that get gradients from its W's}. Raises ValueError for an optimizer that
    can't accumulate.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[int, Iterable[nn.Parameter]],
        num_microbatches: int,
    ) -> None:
        _check_optimizer(optimizer)
        self.optimizer: Any = optimizer
        self._updates = OneByOne(optimizer)
        self._parts = {stage: list(each) for stage, each in parts.items()}
        self._num_microbatches = num_microbatches
        self._optimized: set[int] = set()  # ids of the parameters that the optimizer holds
        self._accumulated: set[int] = set()  # ids of parameters with gradients in the states, not updated yet
        self.has_updated = False
        self.squares: dict[int, Tensor] = {}  # stays empty: no summed gradient exists that has a norm

    def begin(self, loss_scale: float, *, has_graph: bool) -> None:
        """See GradientRelease.

        `finish` refuses a gradient from the caller's graph, which comes after the update.
        """
        self.has_updated = False
        self._accumulated.clear()
        self._optimized = set(map(id, parameters_of(self.optimizer)))
        check_before_step(self.optimizer, loss_scale)
        self._updates.begin()

    def leaf_done(self, stage: int, microbatch: int) -> Done:
        """Let W update the weights in the last microbatch, and only the optimizer's states before that."""
        self.optimizer.optimizer_accumulation = microbatch + 1 < self._num_microbatches
        return self._take

    def complete(self, stage: int) -> None:
        """Update the parameters that got no gradient in the last microbatch, as with a gradient of zero."""
        self.optimizer.optimizer_accumulation = False
        for parameter in self._parts[stage]:
            if id(parameter) in self._accumulated:
                parameter.grad = torch.zeros_like(parameter)
                self._take(parameter)

    def finish(self) -> None:
        """Raise RuntimeError if a parameter has a gradient now, which no W of its stage has made."""
        late = [each for each in parameters_of(self.optimizer) if each.grad is not None]
        if late:
            raise RuntimeError(
                f"{len(late)} parameters got a gradient outside of their stage's W, from a graph of the "
                "caller or a hook, so it is not in the optimizer's states: write gradient_release=step"
            )
        self._updates.finish()

    def _take(self, leaf: Tensor) -> None:
        if leaf.grad is None or id(leaf) not in self._optimized:
            return
        self.has_updated = True
        leaf.grad.mul_(self._num_microbatches)
        self.optimizer.step(param=leaf)
        leaf.grad = None
        if self.optimizer.optimizer_accumulation:
            self._accumulated.add(id(leaf))
        else:
            self._accumulated.discard(id(leaf))


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not is_optimi(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} can't take gradients into its states without an update: accumulate "
            "needs an optimizer of torch-optimi (pip install torch-optimi), such as optimi.AdamW(..., "
            "gradient_release=True); or write gradient_release=step"
        )
    for group in optimizer.param_groups:
        if group.get("momentum") == 0:
            raise ValueError(
                "SGD without momentum has no state that could take up gradients, so only the last "
                "microbatch's would count: write momentum=0.9, dampening=True, or gradient_release=step"
            )
        is_decoupled = group.get("decouple_wd", True) or group.get("decouple_lr", False)
        if group["weight_decay"] and not is_decoupled:
            raise ValueError(
                f"weight_decay={group['weight_decay']:g} is added to the gradient (L2), with accumulate only "
                "to the last microbatch's: write decouple_wd=True, or gradient_release=step"
            )

"""Optimizer accumulation: each microbatch's gradients go into the optimizer's states, and are dropped.

    2W0  Accumulate 2W0   gradients -> states, dropped
    ...
    2W7  Update 2         gradients -> states, weights updated, gradients dropped

So only one stage of a rank has gradients at a time. torch-optimi's optimizers support this: with
`optimizer_accumulation` set, their step changes the states and not the weight. Their moving averages treat
each microbatch as a step, and expect the gradient of the microbatch's mean loss. The pipeline's gradients
have the factor 1 / num_microbatches, so they are multiplied by num_microbatches first. The result equals that
of optimi's own accumulation over the same microbatches. It only approximates the result of summed gradients,
since the betas apply once per microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zbpp.features.gradient_release.restricted_update import is_optimi, parameters_of, update

_WRITE_STEP = "write gradient_release=step, that is, zbpp.GradientRelease without accumulate"


class Accumulation:
    """Adds gradients to the states of an optimizer; prepares those of the last microbatch for the update."""

    def __init__(self, optimizer: Any, num_microbatches: int) -> None:
        self._optimizer, self._num_microbatches = optimizer, num_microbatches
        self._waiting: set[int] = set()  # ids of parameters with gradients in the states, not updated yet

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give these parameters' gradients to the states, and drop them."""
        self._take_out_mean(parameters)
        mine = [each for each in parameters if each.grad is not None]
        self._optimizer.optimizer_accumulation = True
        try:
            update(self._optimizer, mine)
        finally:
            self._optimizer.optimizer_accumulation = False
        for each in mine:
            self._waiting.add(id(each))
            each.grad = None

    def make_ready(self, parameters: Sequence[nn.Parameter]) -> None:
        """Called before the update: give a zero gradient to parameters that the last microbatch gave none."""
        self._take_out_mean(parameters)
        for each in parameters:
            if each.grad is None and id(each) in self._waiting:
                each.grad = torch.zeros_like(each)
            self._waiting.discard(id(each))

    def clear(self) -> None:
        """Called when a step begins: forget a failed step."""
        self._waiting.clear()

    def _take_out_mean(self, parameters: Sequence[nn.Parameter]) -> None:
        for each in parameters:
            if each.grad is not None:
                each.grad.mul_(self._num_microbatches)


def refusal_of(optimizer: Any, shared: Sequence[nn.Parameter]) -> str:
    """Why an optimizer can't accumulate the gradients of these stages; "" if it can.

    shared: the parameters that several stages have, of one rank or of several.
    """
    if not is_optimi(optimizer):
        return (
            f"{type(optimizer).__name__} can't take gradients into its states without an update: "
            "accumulation needs an optimizer of torch-optimi (pip install torch-optimi), such as "
            f"optimi.AdamW(..., gradient_release=True); or {_WRITE_STEP}"
        )
    if any(group.get("momentum") == 0 for group in optimizer.param_groups):
        return (
            "SGD without momentum has no state that could take up gradients, so only the last microbatch's "
            f"would count: write momentum=0.9, dampening=True, or {_WRITE_STEP}"
        )
    if not set(map(id, shared)).isdisjoint(id(each) for each in parameters_of(optimizer)):
        return (
            "accumulation with a parameter that several stages share (tied weights): its gradient in a "
            "microbatch is complete only when all these stages have run their W; untie it, or "
            f"{_WRITE_STEP}"
        )
    return ""

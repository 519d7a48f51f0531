"""Gradient release: weights are updated inside the step, and their gradients are dropped at once.

    ... 2W6  2W7 | update stage 2 | 1W6  1W7 | update stage 1 | ... the other parameters

A stage is updated behind its last W, where the program has its Reduce. With replicas or shards, a stage's
gradients are complete only when its reduction has ended: so at the end of the step the rank waits for one
stage's reduction after the other, updates the stage, and drops its gradients. All other parameters are
updated last: those that several stages or ranks share, those of the loss, and any others that the optimizer
holds, such as those of a graph that the caller built.

A weight is changed after the last F, B and W that read it. So the losses equal, to the last bit, those of a
loop that calls `optimizer.step()` after `pipeline.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

Done = Callable[[Tensor], None]


class GradientRelease(Protocol):
    """How a pipeline uses and drops its gradients inside a step.

    squares: {id of a parameter that the last step updated: its gradient's sum of squares}; empty unless asked
    for.
    """

    squares: dict[int, Tensor]

    @property
    def has_updated(self) -> bool:
        """Whether the current step has changed weights or optimizer states; kept when the step fails."""

    def begin(self, loss_scale: float, *, has_graph: bool) -> None:
        """Called before a step. has_graph: whether a graph of the caller gets gradients at the step's end.

        Raises ValueError or RuntimeError, before anything runs, for what gradient release can't go with.
        """

    def leaf_done(self, stage: int, microbatch: int) -> Done | None:
        """The function that W of a microbatch calls with each leaf whose gradient is complete; None: none."""

    def complete(self, stage: int) -> None:
        """Called when the gradients of a stage are final: behind its last W, or after its reduction."""

    def finish(self) -> None:
        """Called at the end of a step, when all gradients are final."""


def check_before_step(optimizer: torch.optim.Optimizer, loss_scale: float) -> None:
    """Raise ValueError if there is a loss scale, or if a parameter has a gradient before the step."""
    if loss_scale != 1:
        raise ValueError(
            f"loss_scale={loss_scale:g} with gradient release: the optimizer uses each gradient before the "
            "loss scale can be divided out, or the update be skipped; write pipeline.loss_scale = 1, and "
            "bfloat16 in place of float16"
        )
    if any(each.grad is not None for each in parameters_of(optimizer)):
        raise ValueError(
            "a parameter has a gradient before a step that releases gradients: each pipeline.step updates "
            "the weights, so gradients of several steps don't add up; call optimizer.zero_grad(), and use "
            "more microbatches for a larger batch"
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    """The parameters that the optimizer holds now; groups may be added between steps."""
    return (each for group in optimizer.param_groups for each in group["params"])

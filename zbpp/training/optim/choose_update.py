"""Which update goes with the trainer's options: after the step, inside it, or before the norm is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime import GradientRelease, Pipeline
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.optim.post_validated_update import PostValidatedUpdate
from zbpp.training.optim.precision import LossScale
from zbpp.training.optim.update import Outcome, Result, Update, outcome_of, share_of


def make_update(
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    *,
    skips: Callable[[Outcome], bool],
    gradient_release: str,
    per_parameter: bool,
    post_validation: bool,
    clip_norm: float | None,
    masters: MasterWeights | None,
    loss_scale: LossScale | None,
) -> Update:
    """Arguments as those of Trainer and Update. Raises ValueError for options that exclude each other."""
    common: Any = {"clip_norm": clip_norm, "masters": masters, "loss_scale": loss_scale}
    if gradient_release != "off":
        if post_validation:
            raise ValueError(
                "gradient release drops the gradients that post-validation may need again: leave one out"
            )
        return ReleasedUpdate(pipeline, optimizer, per_parameter=per_parameter, **common)
    if not post_validation:
        return Update(optimizer, skips=skips, **common)
    return PostValidatedUpdate(optimizer, pipeline=pipeline, skips=skips, **common)


# ----------------------------------------------------------------
# The Update for gradient release: `pipeline.step` updates the weights, see zbpp.GradientRelease.


class ReleasedUpdate(Update):
    """Sets the learning rate before each step, and gathers the norm after the step.

    per_parameter: see GradientRelease. The other arguments are those of Trainer. Raises ValueError
    for options that need all gradients at the same time: clipping by the norm, a loss scale, master weights.
    Collective.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        *,
        per_parameter: bool,
        clip_norm: float | None,
        masters: MasterWeights | None,
        loss_scale: LossScale | None,
    ) -> None:
        if clip_norm is not None:
            raise ValueError(
                f"clip_norm={clip_norm:g} needs the norm of all gradients before the first update, and "
                "gradient release updates each stage before that: write clip_norm=None, and take an "
                "optimizer that limits each update by itself, such as optimi.StableAdamW"
            )
        if loss_scale is not None or masters is not None:
            raise ValueError(
                "gradient release doesn't go with master weights or a loss scale: write precision=bfloat16 "
                "with optimizer.kahan_sum=true"
            )
        super().__init__(optimizer, clip_norm=None, masters=None, loss_scale=None)
        pipeline.use(GradientRelease(optimizer, keep_squares=True, per_parameter=per_parameter))

    def begin(self, pipeline: Pipeline, factor: float | None) -> None:
        """Set the learning rate. factor: multiplies the optimizer's base learning rate; None: it stays."""
        self._set_rate(factor)

    def end(self, pipeline: Pipeline, losses: Sequence[Tensor]) -> list[Result]:
        """Return the step's result. `pipeline.step` has updated the weights already."""
        scale = pipeline.loss_scale
        outcome = outcome_of(pipeline.place.gather(share_of(pipeline, losses, self.wish)), pipeline, scale)
        return [(outcome, {"grad_norm": outcome.norm, "learning_rate": self._rate, "skipped": False})]

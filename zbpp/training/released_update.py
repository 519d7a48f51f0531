"""The Update for gradient release: `pipeline.step` updates the weights, see zbpp.GradientRelease."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zbpp.runtime import GradientRelease, OptimizerAccumulation, Pipeline
from zbpp.training.loss_scale import LossScale
from zbpp.training.master_weights import MasterWeights
from zbpp.training.outcome import outcome_of, share_of
from zbpp.training.update import Result, Update


class ReleasedUpdate(Update):
    """Sets the learning rate before each step, and gathers the norm after the step.

    accumulate: whether each microbatch's gradients go into the optimizer's states; grad_norm is then None.
    per_parameter: see GradientRelease. The other arguments are those of Trainer. Raises ValueError
    for options that need all gradients at the same time: clipping by the norm, a loss scale, master weights.
    Collective.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        *,
        accumulate: bool,
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
        self._accumulate = accumulate
        if accumulate:
            pipeline.use(OptimizerAccumulation(optimizer))
        else:
            pipeline.use(GradientRelease(optimizer, keep_squares=True, per_parameter=per_parameter))

    def begin(self, pipeline: Pipeline, factor: float | None) -> None:
        """Set the learning rate. factor: multiplies the optimizer's base learning rate; None: it stays."""
        self._set_rate(factor)

    def end(self, pipeline: Pipeline, losses: Sequence[Tensor]) -> list[Result]:
        """Return the step's result. `pipeline.step` has updated the weights already."""
        scale = pipeline.loss_scale
        outcome = outcome_of(pipeline.place.gather(share_of(pipeline, losses, self.wish)), pipeline, scale)
        figures = {
            "grad_norm": None if self._accumulate else outcome.norm,
            "learning_rate": self._rate,
            "skipped": False,
        }
        return [(outcome, figures)]

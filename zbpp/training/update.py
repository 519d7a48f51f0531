"""What becomes of a step's gradients: the norm over all stages, clipping, the optimizer, the master weights.

begin     before the pipeline's step: gradients are zeroed, loss scale and learning rate are set
end       after it: the outcome over all processes, and the update of the weights
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime import Pipeline
from zbpp.runtime.norm import gradients_of, scale_gradients
from zbpp.training.loss_scale import LossScale
from zbpp.training.master_weights import MasterWeights
from zbpp.training.outcome import Outcome, outcome_of, share_of

Metrics = dict[str, Any]


class Update:
    """The update of one rank's weights, which waits for the norm of all ranks' gradients.

    The arguments are the Trainer's. Collective: all ranks call both methods, step by step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        masters: MasterWeights | None,
        loss_scale: LossScale | None,
    ) -> None:
        self._optimizer, self._clip_norm = optimizer, clip_norm
        self._masters, self._loss_scale = masters, loss_scale
        self._base_rates = [group["lr"] for group in optimizer.param_groups]

    def begin(self, pipeline: Pipeline, factor: float) -> None:
        """Prepare a step. factor: on the optimizer's learning rate."""
        (self._masters or self._optimizer).zero_grad()
        if self._loss_scale is not None:
            pipeline.loss_scale = self._loss_scale.value
        for group, base in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def end(self, pipeline: Pipeline, losses: Sequence[Tensor]) -> tuple[Outcome, Metrics]:
        """Update the weights. Returns the step's outcome and what it adds to the metrics."""
        outcome = outcome_of(pipeline.place.gather(share_of(pipeline, losses)), pipeline)
        # All ranks have the same norm: if it isn't finite, all of them skip the update.
        if outcome.is_finite:
            self._update(pipeline, outcome.norm)
        metrics = {
            "grad_norm": outcome.norm,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "skipped": not outcome.is_finite,
            **self._next_loss_scale(pipeline, is_finite=outcome.is_finite),
        }
        return outcome, metrics

    def _update(self, pipeline: Pipeline, norm: float) -> None:
        factor = 1 / pipeline.loss_scale
        if self._clip_norm is not None and norm > self._clip_norm:
            factor *= self._clip_norm / norm
        if factor != 1:
            scale_gradients(gradients_of(pipeline.parameters()), factor)
        self._optimizer.step()
        if self._masters is not None:
            self._masters.update()

    def _next_loss_scale(self, pipeline: Pipeline, *, is_finite: bool) -> Metrics:
        """Choose the next step's loss scale, if it is dynamic; returns the last one as a metric."""
        if self._loss_scale is None:
            return {}
        self._loss_scale.update(is_finite=is_finite)
        return {"loss_scale": pipeline.loss_scale}

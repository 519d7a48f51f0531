"""The update of the weights after a step: norm over all stages, clipping, optimizer, master weights.

begin     before the pipeline's step: zeroes the gradients, sets the loss scale and the learning rate
end       after the pipeline's step: computes the outcome over all processes, and updates the weights
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime import Pipeline
from zbpp.runtime.parallel.norm import gradients_of, scale_gradients
from zbpp.training.loss_scale import LossScale
from zbpp.training.master_weights import MasterWeights
from zbpp.training.outcome import Outcome, outcome_of, share_of

Metrics = dict[str, Any]
Result = tuple[Outcome, Metrics]
"""The outcome of a step, and the metrics of its update."""


def not_finite(outcome: Outcome) -> bool:
    """Whether the norm of the gradients is not finite: what PostValidation skips."""
    return not outcome.is_finite


class Update:
    """The update of one rank's weights, which waits for the norm of all ranks' gradients.

    The arguments are those of Trainer. Collective: all ranks call `begin` and `end` for every step.
    wish: why this rank wants to end the run; None if it does not. All ranks learn it with the step's shares.
    skips: whether the update of a step with this outcome is left out.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None,
        masters: MasterWeights | None,
        loss_scale: LossScale | None,
        skips: Callable[[Outcome], bool] = not_finite,
    ) -> None:
        self._skips = skips
        self._optimizer, self._clip_norm = optimizer, clip_norm
        self._masters, self._loss_scale = masters, loss_scale
        self._base_rates = [group["lr"] for group in optimizer.param_groups]
        self.wish: str | None = None

    def begin(self, pipeline: Pipeline, factor: float | None) -> None:
        """Prepare a step. factor: multiplies the optimizer's base learning rate; None: the rate stays."""
        self._zero_grad()
        self._set_loss_scale(pipeline)
        self._set_rate(factor)

    def end(self, pipeline: Pipeline, losses: Sequence[Tensor]) -> list[Result]:
        """Update the weights. Returns the results that are known by now, in the order of the steps."""
        scale, rate = pipeline.loss_scale, self._rate
        outcome = outcome_of(pipeline.place.gather(share_of(pipeline, losses, self.wish)), pipeline, scale)
        # All ranks have the same outcome, so all of them skip the update, or none.
        if not self._skips(outcome):
            self._update(gradients_of(pipeline.parameters()), self._factor(outcome.norm, scale))
        if self._loss_scale is not None:
            self._loss_scale.update(is_finite=outcome.is_finite)
        return [self._result(outcome, scale, rate)]

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, which may be that of another class of Update."""

    def settle(self) -> list[Result]:
        """Wait until the weights are final. Returns the results that have become known."""
        return []

    def copies(self) -> list[Tensor]:
        """The copies that are kept to take an update back."""
        return []

    def _zero_grad(self) -> None:
        (self._masters or self._optimizer).zero_grad()

    def _set_loss_scale(self, pipeline: Pipeline) -> None:
        if self._loss_scale is not None:
            pipeline.loss_scale = self._loss_scale.value

    def _set_rate(self, factor: float | None) -> None:
        if factor is None:
            return
        for group, base in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = base * factor

    def _factor(self, norm: float, loss_scale: float) -> float:
        """The factor by which the gradients are multiplied, to divide out the loss scale and to clip."""
        factor = 1 / loss_scale
        if self._clip_norm is not None and not norm <= self._clip_norm:  # also for NaN, as in torch
            factor *= self._clip_norm / norm
        return factor

    def _update(self, gradients: list[Tensor], factor: float) -> None:
        if factor != 1:
            scale_gradients(gradients, factor)
        self._optimizer.step()
        if self._masters is not None:
            self._masters.update()

    @property
    def _rate(self) -> float:
        rate: float = self._optimizer.param_groups[0]["lr"]
        return rate

    def _result(self, outcome: Outcome, loss_scale: float, rate: float) -> Result:
        """The Result of a step. loss_scale, rate: the loss scale and the learning rate of this step."""
        metrics = {
            "grad_norm": outcome.norm,
            "learning_rate": rate,
            "skipped": self._skips(outcome),
            **({} if self._loss_scale is None else {"loss_scale": loss_scale}),
        }
        return outcome, metrics

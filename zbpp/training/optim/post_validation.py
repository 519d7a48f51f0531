"""PostValidation: steps of a pipeline and an optimizer, without a wait between two steps.

post_validated_update.py says how the updates are done before all gradients are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime import Pipeline
from zbpp.tracebacks import hiding_own_frames
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.optim.post_validated_update import PostValidatedUpdate
from zbpp.training.optim.precision import LossScale
from zbpp.training.optim.update import Result


class PostValidation:
    """Runs steps of a pipeline and an optimizer, without a wait between two steps.

    clip_norm: gradients are clipped to this norm over all stages together; None: no clipping. An update whose
    gradients are not finite is skipped. masters, loss_scale: as in a loop without this class; this class
    updates both.

        validated = zbpp.PostValidation(pipeline, optimizer, clip_norm=1.0)
        for x, y in batches:
            losses = validated.step(x, target=y)
            scheduler.step()
        validated.finish_update()

    Losses and weights equal those of this loop to the last bit:

            optimizer.zero_grad()
            losses = pipeline.step(x, target=y)
            norm = clip_grad_norm_(pipeline, 1.0)
            if norm.isfinite():
                optimizer.step()
            scheduler.step()

    Between two steps the last update may still be taken back: call `finish_update` before you read the
    weights, or change them, their gradients or the optimizer's states. The pipeline's own methods (evaluate,
    state_dict, close, ...) do so first. Copied, and taken back, are the parameters and what the optimizer
    keeps in its `state` and `param_groups`. norm: the norm of the last step whose norm is known; NaN before
    the first. Collective.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float | None = None,
        masters: MasterWeights | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.pipeline, self.norm = pipeline, math.nan
        self._num_steps: int | None = None  # of the pipeline, after the last step here
        self._update = PostValidatedUpdate(
            optimizer,
            pipeline=pipeline,
            clip_norm=clip_norm,
            masters=masters,
            loss_scale=loss_scale,
        )

    @property
    def num_redone(self) -> int:
        """How many updates were redone so far."""
        return self._update.num_redone

    @property
    def num_taken_back(self) -> int:
        """How many of the redone updates this rank had made at once, and took back."""
        return self._update.num_taken_back

    @hiding_own_frames
    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> list[Tensor]:
        """Run `pipeline.step`, and update the weights; returns the losses. Gradients are zeroed before.

        Raises ValueError if they are those of a `pipeline.step` that was called since the last step here.
        """
        grads = (parameter.grad for parameter in self.pipeline.parameters())
        is_other_step = self._num_steps is not None and self.pipeline.num_steps > self._num_steps
        if is_other_step and any(grad is not None and bool(grad.any()) for grad in grads):
            raise ValueError(
                "PostValidation.step would drop the gradients of a pipeline.step since the last one: call "
                "PostValidation.step alone; or finish_update(), step the optimizer and zero the gradients"
            )
        self._update.prepare(self.pipeline)
        losses = self.pipeline.step(*args, target=target, **kwargs)
        self._num_steps = self.pipeline.num_steps
        self._note(self._update.end(self.pipeline, losses))
        return losses

    def finish_update(self) -> None:
        """Wait until the last update is validated, and redone if it was wrong."""
        self._note(self._update.finish_update())

    def _note(self, results: Sequence[Result]) -> None:
        for outcome, _ in results:
            self.norm = outcome.norm

"""Which update goes with the trainer's options: after the step, inside it, or before the norm is known.

And a check that the optimizer has the parameters that the pipeline trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime import GradientRelease, OptimizerAccumulation, Pipeline
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.optim.post_validated_update import PostValidatedUpdate, Validation
from zbpp.training.optim.precision import LossScale
from zbpp.training.optim.update import Outcome, Result, Update, outcome_of, share_of


def make_update(
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    *,
    skips: Callable[[Outcome], bool],
    gradient_release: str,
    per_parameter: bool,
    post_validation: Validation | None,
    clip_norm: float | None,
    masters: MasterWeights | None,
    loss_scale: LossScale | None,
) -> Update:
    """Arguments as those of Trainer and Update. Raises ValueError for options that exclude each other."""
    common: Any = {"clip_norm": clip_norm, "masters": masters, "loss_scale": loss_scale}
    if gradient_release != "off":
        if post_validation is not None:
            raise ValueError(
                "gradient release drops the gradients that post-validation may need again: leave one out"
            )
        return ReleasedUpdate(
            pipeline,
            optimizer,
            accumulate=gradient_release == "accumulate",
            per_parameter=per_parameter,
            **common,
        )
    if post_validation is None:
        return Update(optimizer, skips=skips, **common)
    return PostValidatedUpdate(
        optimizer, pipeline=pipeline, validation=post_validation, skips=skips, **common
    )


# ----------------------------------------------------------------
# The Update for gradient release: `pipeline.step` updates the weights, see zbpp.GradientRelease.


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


# ----------------------------------------------------------------
# Trainable parameters that appear after the trainer was made: nobody would update them.


class KnownParameters:
    """The parameters that were trainable when the trainer was made, and those that its optimizer got later.

    A parameter that is replaced, added or unfrozen later gets gradients, but no update.
    """

    def __init__(
        self, pipeline: Pipeline, optimizer: torch.optim.Optimizer, masters: MasterWeights | None
    ) -> None:
        self._optimizer, self._masters = optimizer, masters
        # The parameters themselves: an id alone may be that of a later parameter.
        self._known = {id(each): each for each in pipeline.parameters() if each.requires_grad}

    def check(self, pipeline: Pipeline) -> None:
        """Raise RuntimeError for a trainable parameter that the optimizer does not have."""
        for name, parameter in pipeline.named_parameters():
            if not parameter.requires_grad or id(parameter) in self._known:
                continue
            updated = parameter if self._masters is None else self._masters.of(parameter)
            groups = self._optimizer.param_groups
            is_updated = any(each is updated for group in groups for each in group["params"])
            if not is_updated or (self._masters is not None and updated is parameter):
                raise RuntimeError(
                    f"{name} was replaced, added or made trainable after the trainer was made, and its "
                    "optimizer does not have it, so it would never be updated: write the values into the old "
                    "parameter (parameter.copy_ under torch.no_grad()), or make a new optimizer and trainer"
                )
            self._known[id(parameter)] = parameter

"""Which update goes with the trainer's options: after the step, inside it, or before the norm is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zbpp.runtime import Pipeline
from zbpp.training.loss_scale import LossScale
from zbpp.training.master_weights import MasterWeights
from zbpp.training.outcome import Outcome
from zbpp.training.post_validated_update import PostValidatedUpdate, Validation
from zbpp.training.released_update import ReleasedUpdate
from zbpp.training.update import Update


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


def check_gradients(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer, masters: MasterWeights | None
) -> None:
    """Raises ValueError for an optimizer that would read `.grad` where W sums in a `main_grad`."""
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in pipeline.named_parameters():
        if getattr(parameter, "main_grad", None) is None:
            continue
        if masters is None or masters.of(parameter) is parameter:
            raise ValueError(
                f"{name} has a main_grad, where W adds its gradient, but no master whose gradient it is: "
                "give the trainer masters=MasterWeights(...) of all stages, or leave main_grad out"
            )
        if id(parameter) in optimized:
            raise ValueError(
                f"the optimizer updates {name}, whose gradient is its master's: make the optimizer over "
                "masters.parameters()"
            )

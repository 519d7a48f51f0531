"""What a step came to: its loss, the norm of its gradients and its named losses, over all processes.

Each process makes its Share after its last W. The Outcome is computed from the shares of all processes, in
the order of the mesh, so it is the same to the last bit wherever it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zbpp.runtime import Pipeline
from zbpp.runtime.named_losses import Means, summed
from zbpp.runtime.norm import norm_of, squares_in_mesh


class Share(NamedTuple):
    """One process's part of an Outcome.

    loss: mean over microbatches; None but on owners of the last stage. squares: of each parameter's gradient,
    with the loss scale in them. named: see NamedLosses.means. wish: why this process wants to end the run.
    """

    loss: float | None
    squares: list[float]
    named: Means
    wish: str | None = None


class Outcome(NamedTuple):
    """What a step came to. norm: of the gradients of all stages, without the loss scale.

    wish: the first process's that has one.
    """

    loss: float
    norm: float
    named: dict[str, float]
    wish: str | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the gradients can be used."""
        return math.isfinite(self.norm)


def share_of(pipeline: Pipeline, losses: Sequence[Tensor], wish: str | None = None) -> Share:
    """This process's share of the step that the pipeline has just done. Collective over parts of a stage."""
    mean = torch.stack([*losses]).double().mean().item() if losses else None
    return Share(mean, squares_in_mesh(pipeline), pipeline.step_losses.means(), wish)


def outcome_of(shares: Sequence[Share], pipeline: Pipeline, loss_scale: float) -> Outcome:
    """The outcome from the shares of all processes, in the order of `place.gather`.

    loss_scale: the pipeline's in that step.
    """
    found = [each.loss for each in shares if each.loss is not None]  # from the owners of the last stage
    # All pipelines have the same gradients: the norm is that of the first one.
    norm = norm_of(each.squares for each in shares[: pipeline.timetable.num_ranks]) / loss_scale
    named = summed([each.named for each in shares], pipeline.place.num_pipelines)
    wish = next((each.wish for each in shares if each.wish), None)
    return Outcome(math.fsum(found) / len(found), norm, named, wish)

"""The outcome of a step over all processes: its loss, the norm of its gradients and its named losses.

Each process makes its Share after its last W. Every process computes the Outcome from the shares of all
processes in the order of the mesh, so all processes get the same Outcome to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zbpp.runtime import Pipeline
from zbpp.runtime.call import Means, summed
from zbpp.runtime.parallel.norm import norm_of, squares_in_mesh


class Share(NamedTuple):
    """One process's part of an Outcome.

    loss: the mean over microbatches on a process with the last stage; None on others. squares: the sum of
    squares of each parameter's gradient, which contains the loss scale. named: see NamedLosses.means. wish:
    why this process wants to end the run; None if it does not.
    """

    loss: float | None
    squares: list[float]
    named: Means
    wish: str | None = None


class Outcome(NamedTuple):
    """The outcome of a step. norm: of the gradients of all stages, with the loss scale divided out.

    wish: why a process wants to end the run (the first one that does); None if none does.
    """

    loss: float
    norm: float
    named: dict[str, float]
    wish: str | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the norm is finite, so that the gradients can be used."""
        return math.isfinite(self.norm)


def share_of(pipeline: Pipeline, losses: Sequence[Tensor], wish: str | None = None) -> Share:
    """This process's share of the step that the pipeline has just run.

    Collective over the processes that hold shards or tensor-parallel parts of the same stage.
    """
    mean = torch.stack([*losses]).double().mean().item() if losses else None
    return Share(mean, squares_in_mesh(pipeline), pipeline.step_losses.means(), wish)


def outcome_of(shares: Sequence[Share], pipeline: Pipeline, loss_scale: float) -> Outcome:
    """The outcome from the shares of all processes, in the order of `place.gather`.

    loss_scale: the pipeline's loss scale in that step.
    """
    found = [each.loss for each in shares if each.loss is not None]  # from processes with the last stage
    # All pipelines of the mesh have the same summed gradients: the norm of the first one is that of all.
    norm = norm_of(each.squares for each in shares[: pipeline.timetable.num_ranks]) / loss_scale
    named = summed([each.named for each in shares], pipeline.place.num_pipelines)
    wish = next((each.wish for each in shares if each.wish), None)
    # math.fsum raises an error for inf - inf.
    total = math.fsum(found) if math.isfinite(sum(found)) else sum(found)
    return Outcome(total / len(found), norm, named, wish)

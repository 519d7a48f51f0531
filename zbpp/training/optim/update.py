"""The outcome of a step, and the update of the weights: norm over all stages, clipping, master weights.

begin     before the pipeline's step: zeroes the gradients, sets the loss scale and the learning rate
end       after the pipeline's step: computes the outcome over all processes, and updates the weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.features.gradient_release.gradient_release import GradientRelease
from zbpp.features.reductions.norm import clip_factor, gradients_of, norm_of, scale_gradients, squares_in_mesh
from zbpp.runtime import Pipeline
from zbpp.runtime.call.results import Means, NamedLosses, summed
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.optim.precision import LossScale

# ----------------------------------------------------------------
# The outcome of a step over all processes: its loss, the norm of its gradients and its named losses.
#
# Each process makes its Share after its last W. Every process computes the Outcome from the shares of all
# processes in the order of the mesh, so all processes get the same Outcome to the last bit.


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


# ----------------------------------------------------------------
# Named losses (auxiliary losses, and losses that are dicts) beside the trainer's other metrics.

_LATER = {"measured_makespan_ms", "expected_makespan_ms"}
"""Metrics that only some steps have; their names are taken, too."""


def with_named_losses(metrics: Mapping[str, Any], losses: Mapping[str, float]) -> dict[str, Any]:
    """The metrics of a step, and its named losses. Raises ValueError for a loss with a metric's name."""
    taken = [name for name in losses if name in metrics or name in _LATER or name.startswith("evaluation_")]
    _refuse(taken, "the trainer")
    return {**metrics, **losses}


def with_evaluation_losses(metrics: Mapping[str, float], losses: NamedLosses) -> dict[str, float]:
    """A model's metrics of an evaluation, and its named losses. Raises ValueError if two have one name."""
    found = summed([losses.means()])
    _refuse(found.keys() & metrics.keys(), "the model's metrics(output, target)")
    return {**metrics, **found}


def _refuse(taken: Iterable[str], owner: str) -> None:
    if names := sorted(taken):
        raise ValueError(
            f"a loss is called {names[0]!r}, as a metric of {owner} is: give the loss another name, in "
            "zbpp.auxiliary_loss or in the dict of losses"
        )


# ---------------------------------------------------------------- the update

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

    def finish_update(self) -> list[Result]:
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
        return (1.0 if self._clip_norm is None else clip_factor(norm, self._clip_norm)) / loss_scale

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


class ReleasedUpdate(Update):
    """The update of a pipeline whose step updates the weights itself, see zbpp.GradientRelease.

    It sets the learning rate before each step, and gathers the norm after the step.

    accumulate, per_parameter: see GradientRelease; with accumulate no norm is known. The other arguments are
    those of Trainer. Raises ValueError for options that need all gradients at the same time: clipping by the
    norm, a loss scale, master weights.
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
                "optimizer=optimi_adamw"
            )
        super().__init__(optimizer, clip_norm=None, masters=None, loss_scale=None)
        self._accumulates = accumulate
        pipeline.use(
            GradientRelease(
                optimizer, accumulate=accumulate, keep_squares=not accumulate, per_parameter=per_parameter
            )
        )

    def begin(self, pipeline: Pipeline, factor: float | None) -> None:
        """Set the learning rate. factor: multiplies the optimizer's base learning rate; None: it stays."""
        self._set_rate(factor)

    def end(self, pipeline: Pipeline, losses: Sequence[Tensor]) -> list[Result]:
        """Return the step's result. `pipeline.step` has updated the weights already."""
        scale = pipeline.loss_scale
        outcome = outcome_of(pipeline.place.gather(share_of(pipeline, losses, self.wish)), pipeline, scale)
        norm = None if self._accumulates else outcome.norm
        return [(outcome, {"grad_norm": norm, "learning_rate": self._rate, "skipped": False})]

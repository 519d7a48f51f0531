"""Post-validation: ranks update their weights before they know the norm of all gradients.

This is the method of the Zero Bubble paper, arXiv:2401.10241, section 4. A rank whose own gradients are
finite and below the clipping threshold updates its weights at once, unclipped, and begins the next step. The
F's before its gate (features/post_validation/gate.py) use the new weights; at the gate the rank waits for
the norm:

    rank 0   ... W  update  F  F  F  F  |gate  B  F  W ...
    rank 1      ... W  update  F  F  F  |gate  B  F  W ...
                       when all ranks have posted their shares, each rank knows the norm

If the gradients should have been clipped, or some rank's gradients (in a Trainer: or losses) are not finite,
each rank takes its update back, does what the synchronous run does (it scales the gradients and updates, or
skips the update), and begins the step again. Losses and weights equal those of the synchronous run to the
last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.features.post_validation.posts import Ticket
from zbpp.features.post_validation.validation import validation_of
from zbpp.features.reductions.norm import clip_factor, gradients_of, is_bound, norm_of
from zbpp.job.agreement import check_equal
from zbpp.runtime import Pipeline
from zbpp.training.optim.master_weights import MasterWeights
from zbpp.training.optim.precision import LossScale
from zbpp.training.optim.rollback import Rollback
from zbpp.training.optim.update import Outcome, Result, Share, Update, not_finite, outcome_of, share_of


class _Posted(NamedTuple):
    """What a rank posts after its last W.

    has_stepped: whether the rank updates its weights at once. refusal: why the rank can't go on, or "".
    """

    share: Share
    has_stepped: bool
    refusal: str


class _Pending(NamedTuple):
    """An update that is not validated yet.

    gradients: of its step; kept here, since a sharded stage has other parameters while its weights are
        gathered in the next step.
    has_stepped: whether this rank has updated its weights at once. loss_scale, rate: the loss scale and the
        learning rate of its step. scale_before: the state of the LossScale before the update.
    """

    pipeline: Pipeline
    gradients: list[Tensor]
    ticket: Ticket
    has_stepped: bool
    loss_scale: float
    rate: float
    scale_before: dict[str, Any] | None


class PostValidatedUpdate(Update):
    """An Update that does not wait for the norm, and is its pipeline's PendingUpdate.

    num_redone: how many updates were redone. num_taken_back: how many of the redone updates this rank had
    made at once. Raises ValueError on all ranks for a pipeline whose steps can't begin again. Collective.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        pipeline: Pipeline,
        clip_norm: float | None,
        masters: MasterWeights | None,
        loss_scale: LossScale | None,
        skips: Callable[[Outcome], bool] = not_finite,
    ) -> None:
        if clip_norm is not None and not (is_bound(clip_norm) and 0 < clip_norm < math.inf):
            raise ValueError(f"clip_norm={clip_norm!r}: write a number above 0, or None for no clipping")
        super().__init__(optimizer, clip_norm=clip_norm, masters=masters, loss_scale=loss_scale, skips=skips)
        pipeline.finish_update()  # another PostValidation may have used the pipeline before
        validation_of(pipeline)
        check_equal("options of post-validation", pipeline.place.gather({"clip_norm": clip_norm}))
        self._pipeline = pipeline
        self._rollback = Rollback(optimizer)
        self._pending: _Pending | None = None
        self._results: list[Result] = []
        self.num_redone = self.num_taken_back = 0

    def begin(self, pipeline: Pipeline, factor: float | None) -> None:
        """Prepare a step. factor: multiplies the optimizer's base learning rate; None: the rate stays."""
        self.prepare(pipeline)
        self._set_rate(factor)

    def prepare(self, pipeline: Pipeline) -> None:
        """As `begin`, but leave the learning rate to the caller."""
        self._pipeline, validation = pipeline, validation_of(pipeline)
        if validation.pending is not None and validation.pending is not self:
            pipeline.finish_update()
        if self._pending is None:  # otherwise `zero_grad` zeroes the gradients, after the gate
            self._zero_grad()
        self._set_loss_scale(pipeline)
        validation.set_name_of_step("PostValidation.step")

    def end(self, pipeline: Pipeline, losses: Sequence[Tensor]) -> list[Result]:
        """Update the weights at once. Returns the results of the steps whose norm is known by now."""
        validation = validation_of(pipeline)
        validation.set_name_of_step("step")
        share, scale = share_of(pipeline, losses, self.wish), pipeline.loss_scale
        steps = self._is_good(norm_of([share.squares]) / scale)
        has_changed = validation.has_changed_inputs
        refusal = _CHANGED_INPUTS.format(rank=pipeline.rank) if has_changed else ""
        ticket = validation.posts.post(_Posted(share, steps, refusal))
        scale_before = None if self._loss_scale is None else self._loss_scale.state_dict()
        gradients = gradients_of(pipeline.parameters())
        try:
            # Also if this rank updates only at the gate: options such as the learning rate may change before.
            self._rollback.keep(steps=steps, scales=scale != 1)
            if steps:
                self._update(gradients, 1 / scale)
            else:
                # The update follows at the gate. torch's learning-rate schedulers warn if called before the
                # optimizer's first step.
                self._optimizer._opt_called = True  # type: ignore[attr-defined]  # the schedulers' own
            self._rollback.after_step()
        except BaseException as error:  # the other ranks have this rank's share, and continue the run
            why = f"an update failed ({type(error).__name__}: {error}), and may be half done"
            validation.give_up(why)
            raise
        self._pending = _Pending(pipeline, gradients, ticket, steps, scale, self._rate, scale_before)
        if self._loss_scale is not None:  # for the next step; `_redo` undoes it if a gradient is not finite
            self._loss_scale.update(is_finite=True)
        validation.pending = self
        return self._take_results()

    def copies(self) -> list[Tensor]:
        """See Update."""
        return self._rollback.tensors()

    def finish_update(self) -> list[Result]:
        """Wait until the last update is validated. Returns the results that have become known."""
        if self._pending is not None:
            self._pending.pipeline.finish_update()
        return self._take_results()

    # ---- The PendingUpdate of a pipeline

    @property
    def loss_scale(self) -> float:
        """See PendingUpdate."""
        return self._pipeline.loss_scale

    def validate(self) -> bool:
        """Wait for the norm, and redo the update if it was wrong. Returns whether the update was right.

        Raises ValueError on all ranks if one rank has posted that it can't go on.
        """
        pending, self._pending = self._pending, None
        assert pending is not None  # `end` sets the pipeline's pending update and this one together
        posted: list[_Posted] = pending.ticket.collect()
        for each in posted:
            if each.refusal:
                raise ValueError(each.refusal)
        shares = [each.share for each in posted]
        outcome = outcome_of(shares, pending.pipeline, pending.loss_scale)
        is_right = self._is_good(outcome.norm) and all(each.has_stepped for each in posted)
        is_right = is_right and not self._skips(outcome)
        if not is_right:
            self.num_redone += 1
            self.num_taken_back += pending.has_stepped
            with self._rollback.undone():
                self._redo(pending, outcome)
        self._results.append(self._result(outcome, pending.loss_scale, pending.rate))
        self._rollback.forget()  # their memory is free for the activations of this step
        return is_right

    def zero_grad(self) -> None:
        """See PendingUpdate. Zeroes the gradients: the W's of the next step follow."""
        self._zero_grad()

    def _redo(self, pending: _Pending, outcome: Outcome) -> None:
        """Do the update as the synchronous run does it."""
        if not self._skips(outcome):
            self._update(pending.gradients, self._factor(outcome.norm, pending.loss_scale))
            return
        if self._masters is not None:
            self._masters.update()  # casts again: the parameters were cast from the masters taken back
        if self._loss_scale is not None and pending.scale_before is not None and not outcome.is_finite:
            self._loss_scale.load_state_dict(pending.scale_before)
            self._loss_scale.update(is_finite=False)
            pending.pipeline.loss_scale = self._loss_scale.value

    def _is_good(self, norm: float) -> bool:
        """Whether gradients of this norm are finite and need no clipping."""
        return math.isfinite(norm) and (self._clip_norm is None or clip_factor(norm, self._clip_norm) == 1)

    def _take_results(self) -> list[Result]:
        results, self._results = self._results, []
        return results


_CHANGED_INPUTS = (
    "a stage on rank {rank} changes its inputs, its targets or a frozen parameter in place, and a step that "
    "begins again would get the changed values: clone inputs in the stage, make such a parameter a buffer, "
    "or write optimizer.validation=before"
)

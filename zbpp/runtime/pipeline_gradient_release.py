"""The part of Pipeline for gradient release (gradient_release.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.gradient_release import make_gradient_release
from zbpp.runtime.mesh import Place
from zbpp.runtime.pipeline_end import PipelineEnd
from zbpp.runtime.stage import Loss


class PipelineGradientRelease(PipelineEnd):
    """The part of Pipeline that releases gradients."""

    stages: Mapping[int, nn.Module]
    place: Place
    _loss_fn: Loss | None
    _late: list[nn.Parameter]  # parameters whose gradients are final only when all stages have run their W's
    _release_arguments: dict[str, Any]

    def release_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        accumulate: bool = False,
        keep_squares: bool = False,
        per_parameter: bool = False,
    ) -> None:
        """From the next step on, `step` updates this rank's weights itself and drops their gradients.

        A stage is updated behind its last W; with replicas or shards, when its gradients have been reduced.
        Shared and tied parameters are updated at the end. Losses equal, to the last bit, those of a loop that
        calls `optimizer.step()` after each step. Remove that call and `zero_grad` from the loop. The learning
        rate may be changed between steps, also by torch's schedulers.

        optimizer: of all or some of `parameters()`; the gradients of the other parameters stay. Its step
        hooks run at each update. accumulate: each microbatch's gradients go into the states of an optimizer
        of torch-optimi, and are dropped one by one; see zbpp/runtime/gradient_release.py. keep_squares: fill
        `released_squares`, from which the norm is computed; without effect if accumulate is set.
        per_parameter: what the caller says of an optimizer that is none of torch.optim's or torch-optimi's:
        it updates each parameter from this parameter's gradient alone, and keeps no count of steps for
        several parameters.

        The gradients are gone when `step` returns: nothing can clip them by their norm, scale them, or skip
        an update because a gradient is infinite or NaN. A step that fails may have updated some weights, and
        no step may follow it. Raises ValueError, on every rank, for an optimizer, a stage or a mesh that
        gradient release can't go with. Collective over the mesh.
        """
        self.meet("release_gradients")
        release, refusal = None, ""
        if self._release_arguments.get("optimizer", optimizer) is not optimizer:
            refusal = (
                "gradients are released to another optimizer already, and a pipeline can have only one: make "
                "one optimizer with a group for each kind of parameters"
            )
        loss = self._loss_fn if isinstance(self._loss_fn, nn.Module) else nn.Module()
        computes_loss = self.timetable.num_stages - 1 in self.stages
        try:
            release = make_gradient_release(
                optimizer,
                self.stages,
                self._late,
                loss.parameters() if computes_loss else (),
                self.place,
                self.timetable.num_microbatches,
                accumulate=accumulate,
                keep_squares=keep_squares,
                per_parameter=per_parameter,
            )
        except ValueError as error:
            refusal = str(error)
        for each in self.place.gather(refusal):
            if each:
                raise ValueError(each)
        self._engine.release_gradients(release)
        self._release_arguments = {
            "optimizer": optimizer,
            "accumulate": accumulate,
            "keep_squares": keep_squares,
            "per_parameter": per_parameter,
        }

    @property
    def releases_gradients(self) -> bool:
        """Whether `step` updates the weights itself and drops the gradients."""
        return bool(self._release_arguments)

    @property
    def released_squares(self) -> Mapping[int, Tensor]:
        """{id of a parameter that the last step updated: its gradient's sum of squares}; see keep_squares."""
        return self._engine.released_squares

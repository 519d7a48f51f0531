"""Steps of a pipeline that update the weights themselves, and drop the gradients: gradient_release.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.mesh import Place
from zbpp.runtime.pipeline_end import PipelineEnd
from zbpp.runtime.released import make_release
from zbpp.runtime.stage import Loss


class PipelineRelease(PipelineEnd):
    """The part of Pipeline that releases gradients."""

    stages: dict[int, nn.Module]
    place: Place
    _loss_fn: Loss | None
    _late: list[nn.Parameter]  # their gradients are final only when all stages' are
    _release_arguments: dict[str, Any]

    def release_gradients(
        self, optimizer: torch.optim.Optimizer, *, accumulate: bool = False, keep_squares: bool = False
    ) -> None:
        """From the next step on, `step` updates this rank's weights itself and drops their gradients.

        A stage is updated behind its last W, or when its gradients have been reduced over replicas and
        shards; shared and tied parameters at the end. Losses are those of a loop with `optimizer.step()`
        after each step, to the last bit. Such a loop goes on without it, and without zero_grad; the
        learning rate may be changed between steps, also by torch's schedulers.

        optimizer: of all or some of `parameters()`; gradients of others stay, as without release.
        accumulate: each microbatch's gradients go into the states of an optimizer of torch-optimi, and are
        dropped one by one; see zbpp/runtime/optimizer_accumulation.py. keep_squares: `released_squares` then
        has what the norm is made of; not with accumulate.

        Gradients are gone when `step` returns: nothing can clip them by their norm, scale them, or skip an
        update because one is infinite or NaN. A step that fails may have updated some weights, and no
        step may follow it. Raises ValueError, on every rank, for what can't work. Collective over the mesh.
        """
        self.meet("release_gradients")
        release, refusal = None, ""
        if self._release_arguments.get("optimizer", optimizer) is not optimizer:
            refusal = (
                "gradients are released to another optimizer already, and one call replaces the other: make "
                "one optimizer with a group for each kind of parameters"
            )
        loss = self._loss_fn if isinstance(self._loss_fn, nn.Module) else nn.Module()
        last = self.timetable.num_stages - 1
        try:
            release = make_release(
                optimizer,
                self.stages,
                self._late,
                loss.parameters() if last in self.stages else (),
                self.place,
                last,
                self.timetable.num_microbatches,
                accumulate=accumulate,
                keep_squares=keep_squares,
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
        }

    @property
    def releases_gradients(self) -> bool:
        """Whether steps update the weights themselves, and leave no gradients."""
        return bool(self._release_arguments)

    @property
    def released_squares(self) -> Mapping[int, Tensor]:
        """By id of each parameter that the last step updated, its gradient's sum of squares; see above."""
        return self._engine.released_squares

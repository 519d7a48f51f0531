"""Gradient release: weights are updated inside the step, and their gradients are dropped at once.

    ... 2W6  2W7 | update stage 2 | 1W6  1W7 | update stage 1 | ... the rest

A stage is updated where the program has its Reduce: behind its last W. With replicas or shards its gradients
are complete when its reduction has ended: at the end of the step one stage after the other is waited for,
updated, and its gradients are dropped. The rest is updated last: parameters that several stages or ranks
have, those of the loss, and others that the optimizer holds, also those of a graph of the caller.

A weight is changed after the last F, B and W that read it. So the losses are those of a loop that steps the
optimizer after the pipeline, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from zbpp.runtime.partial_updates import PartialUpdates, partial_updates
from zbpp.runtime.squares import square_of

Done = Callable[[Tensor], None]


class Release(Protocol):
    """What a pipeline that releases gradients does with them.

    squares: of each parameter (by id) that the last step has updated, the gradient's sum of squares, if it
    is asked for.
    """

    squares: dict[int, Tensor]

    @property
    def has_updated(self) -> bool:
        """Whether the step that runs, or has failed, has changed weights or the optimizer's states."""

    def begin(self, loss_scale: float, *, has_graph: bool) -> None:
        """Called before a step. has_graph: whether the caller's graph gets gradients at the step's end.

        Raises ValueError or RuntimeError for what can't be composed with release, before anything runs.
        """

    def leaf_done(self, stage: int, microbatch: int) -> Done | None:
        """What W of a microbatch calls with each leaf when the leaf's gradient is complete; None: nothing."""

    def complete(self, stage: int) -> None:
        """Called when the gradients of a stage are final on all its copies."""

    def finish(self) -> None:
        """Called when a step has ended, and all gradients are there."""


class GradientRelease:
    """Updates each stage's parameters as soon as their gradients are final, then drops the gradients.

    parts: per stage its parameters that no other stage, no other rank and no loss has. keep_squares: whether
    `squares` is kept. Raises ValueError for an optimizer that can't update parameters in parts.

    squares: of each parameter (by id) that the last step has updated, the gradient's sum of squares.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[int, Iterable[nn.Parameter]],
        *,
        keep_squares: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self._updates: PartialUpdates = partial_updates(optimizer)
        self._parts = {stage: list(each) for stage, each in parts.items()}
        self._keeps_squares = keep_squares
        self.squares: dict[int, Tensor] = {}
        self._released: set[int] = set()  # ids
        self._waits = False  # whether all updates wait for the caller's graph
        self.has_updated = False

    def begin(self, loss_scale: float, *, has_graph: bool) -> None:
        """See Release."""
        self.has_updated = False
        self.squares.clear()
        self._released.clear()
        self._waits = has_graph
        check_before_step(self.optimizer, loss_scale)
        self._updates.begin()

    def leaf_done(self, stage: int, microbatch: int) -> Done | None:
        """W sums gradients as without release."""
        return None

    def complete(self, stage: int) -> None:
        """Update the stage's own parameters."""
        if self._waits:
            return
        optimized = set(map(id, parameters_of(self.optimizer)))
        mine = [each for each in self._parts[stage] if each.grad is not None and id(each) in optimized]
        if mine:
            self._update(mine)

    def finish(self) -> None:
        """Update what is left. Raises RuntimeError for a gradient that came after its parameter's update."""
        rest = [each for each in parameters_of(self.optimizer) if each.grad is not None]
        late = [each for each in rest if id(each) in self._released]
        if late:
            raise RuntimeError(
                f"{len(late)} parameters got a gradient after their stage's last W, when they were updated "
                "already (does a hook, or another thread, run a backward?): write gradient_release=off"
            )
        if rest or not self.has_updated:  # without any gradient too, the optimizer's step is called once
            self._update(rest)
        self._updates.finish()

    def _update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update parameters that have gradients, and drop these."""
        self.has_updated = True
        if self._keeps_squares:
            self.squares |= {id(each): square_of(each.grad) for each in parameters if each.grad is not None}
        self._updates.update(parameters)
        for parameter in parameters:
            parameter.grad = None
        self._released.update(map(id, parameters))


def check_before_step(optimizer: torch.optim.Optimizer, loss_scale: float) -> None:
    """Raise ValueError for a loss scale, and for gradients that are there before a step."""
    if loss_scale != 1:
        raise ValueError(
            f"loss_scale={loss_scale:g} with released gradients: they are used before anything can divide by "
            "it, or skip the update; write pipeline.loss_scale = 1, and bfloat16 in place of float16"
        )
    if any(each.grad is not None for each in parameters_of(optimizer)):
        raise ValueError(
            "a parameter has a gradient before a step that releases gradients: each pipeline.step updates "
            "the weights, so gradients of several steps don't add up; drop it (optimizer.zero_grad()), and "
            "use more microbatches for a larger batch"
        )


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    """The parameters that the optimizer holds at this time."""
    return (each for group in optimizer.param_groups for each in group["params"])

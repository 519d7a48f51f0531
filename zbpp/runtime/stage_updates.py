"""Gradient release, stage by stage: a stage's weights are updated as soon as its gradients are final.

gradient_release.py says when, and optimizer_accumulation.py does the same with each microbatch's gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zbpp.runtime.gradient_release import Done, check_before_step, parameters_of
from zbpp.runtime.partial_updates import PartialUpdates, partial_updates
from zbpp.runtime.squares import square_of


class StageUpdates:
    """Updates each stage's parameters as soon as their gradients are final, then drops the gradients.

    parts: {stage: its parameters that belong to no other stage, no other rank and no loss}. keep_squares:
    whether to fill `squares`. squares: see GradientRelease. Raises ValueError for an optimizer that
    can't update some of its parameters before the others.
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
        self._released: set[int] = set()  # ids of the parameters that this step has updated
        self._waits_for_graph = False  # whether all updates wait until the caller's graph has its gradients
        self.has_updated = False

    def begin(self, loss_scale: float, *, has_graph: bool) -> None:
        """See GradientRelease."""
        self.has_updated = False
        self.squares.clear()
        self._released.clear()
        self._waits_for_graph = has_graph
        check_before_step(self.optimizer, loss_scale)
        self._updates.begin()

    def leaf_done(self, stage: int, microbatch: int) -> Done | None:
        """None: W sums a leaf's gradients as without release."""
        return None

    def complete(self, stage: int) -> None:
        """Update the parameters that the stage alone has, unless updates wait for the caller's graph."""
        if self._waits_for_graph:
            return
        optimized = set(map(id, parameters_of(self.optimizer)))
        mine = [each for each in self._parts[stage] if each.grad is not None and id(each) in optimized]
        if mine:
            self._update(mine)

    def finish(self) -> None:
        """Update the other parameters. Raises RuntimeError if an updated parameter got a gradient again."""
        rest = [each for each in parameters_of(self.optimizer) if each.grad is not None]
        late = [each for each in rest if id(each) in self._released]
        if late:
            raise RuntimeError(
                f"{len(late)} parameters got a gradient after their stage's last W, where they had been "
                "updated (does a hook, or another thread, run a backward?): write gradient_release=off"
            )
        if rest or not self.has_updated:  # a step without any gradient calls the optimizer's step, too
            self._update(rest)
        self._updates.finish()

    def _update(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update parameters, and drop their gradients."""
        self.has_updated = True
        if self._keeps_squares:
            self.squares |= {id(each): square_of(each.grad) for each in parameters if each.grad is not None}
        self._updates.update(parameters)
        for parameter in parameters:
            parameter.grad = None
        self._released.update(map(id, parameters))

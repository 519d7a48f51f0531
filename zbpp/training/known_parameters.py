"""Trainable parameters that appear after the trainer was made: nobody would update them."""

from __future__ import annotations

import torch

from zbpp.runtime import Pipeline
from zbpp.training.master_weights import MasterWeights


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

"""Losses that have a name: auxiliary losses, and the entries of a loss that is a dict.

A StageWorker keeps them as tensors. They become numbers only when a caller asks for them, so a step does not
wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from zbpp.autograd.auxiliary import named_scalar

Means = dict[str, list[float]]
"""{name: one mean over microbatches per stage that reported the name, in the order of stages}."""


class NamedLosses:
    """What the stages of one rank reported in one step or evaluation.

    stages: for each stage {name: scalar tensors, one per microbatch that reported the name}.
    """

    def __init__(
        self, stages: Iterable[Mapping[str, Sequence[Tensor]]] = (), num_microbatches: int = 1
    ) -> None:
        self._stages, self._num_microbatches = list(stages), num_microbatches

    def means(self) -> Means:
        """This rank's means, for `summed`. A microbatch in which a stage reported nothing counts as zero."""
        pairs = [(name, values) for stage in self._stages for name, values in stage.items()]
        if not pairs:
            return {}
        totals = [torch.stack([*values]).double().sum() for _, values in pairs]
        numbers = torch.stack([total.to(totals[0].device) for total in totals]).tolist()
        means: Means = {}
        for (name, _), number in zip(pairs, numbers, strict=True):
            means.setdefault(name, []).append(number / self._num_microbatches)
        return means


def summed(means: Iterable[Means], num_pipelines: int = 1) -> dict[str, float]:
    """{name: the sum over all stages, averaged over pipelines}, names sorted.

    means: of each rank of each pipeline. The sum does not depend on which rank has which stage.
    """
    everything: Means = {}
    for each in means:
        for name, numbers in each.items():
            everything.setdefault(name, []).extend(numbers)
    return {name: _sum(everything[name]) / num_pipelines for name in sorted(everything)}


def _sum(numbers: Sequence[float]) -> float:
    """The sum, rounded once; inf or NaN if it is not finite, where math.fsum raises an error."""
    return math.fsum(numbers) if math.isfinite(sum(numbers)) else sum(numbers)


def checked_losses(losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A loss that is a dict, each entry with shape []. Raises ValueError for entries that are no losses."""
    if not losses:
        raise ValueError("the loss is an empty dict: return {name: scalar tensor}, or one scalar tensor")
    if "loss" in losses:
        raise ValueError(
            f"the loss is a dict with the entries {', '.join(map(repr, losses))}. Entries are summed, and "
            "in many libraries 'loss' is the sum already: return output['loss'] alone if it is; if it is one "
            "of the terms, give it another name"
        )
    return {name: named_scalar("the loss", name, value) for name, value in losses.items()}

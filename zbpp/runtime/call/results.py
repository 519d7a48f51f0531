"""What one call of a pipeline gives back: losses, named losses, and in an evaluation outputs and metrics.

Named losses are auxiliary losses, and the entries of a loss that is a dict. A StageWorker keeps them as
tensors. They become numbers when a caller asks for them, so a step does not wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from zbpp.autograd.models.auxiliary import named_scalar
from zbpp.error_text import kind_of
from zbpp.runtime.call.feed import Metrics, Observe


class Result(NamedTuple):
    """What one call gives back on this rank. Without the last stage there are named losses alone.

    losses: of the microbatches, in the caller's order. outputs, metrics: see Pipeline.evaluate; None and {}
    if the caller asks for none.
    """

    losses: list[Tensor]
    named: NamedLosses
    outputs: Any
    metrics: Mapping[str, float]


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


class Outputs:
    """Collects the outputs and metrics of the microbatches of one call of `Pipeline.evaluate`."""

    def __init__(self, *, is_kept: bool, metrics: Metrics | None) -> None:
        self._is_kept, self._compute = is_kept, metrics
        self._outputs: list[Any] = []
        self._metrics: list[tuple[int, dict[str, float]]] = []  # (rows, values)

    def take(self, output: Any, target: Any) -> None:
        """Take what the last stage returned for the next microbatch, and the microbatch's target."""
        if self._is_kept:
            self._outputs.append(tree_map(_kept, output))
        if self._compute is not None:
            self._metrics.append((_rows(output), _numbers(self._compute(output, target))))

    def concatenated(self) -> Any:
        """The outputs in the last stage's structure, concatenated along dim 0; None on other ranks.

        Tensors without dimensions are stacked; None stays None; any other value, and tensors that differ
        beyond dim 0, become a list with one value per microbatch that is not empty.
        """
        if not self._outputs:
            return None
        columns = zip(*(tree_leaves(output) for output in self._outputs), strict=True)
        return tree_unflatten(list(map(_joined, columns)), tree_flatten(self._outputs[0])[1])

    def metrics(self) -> dict[str, float]:
        """The mean of each metric over all rows; {} on other ranks."""
        if not self._metrics:
            return {}
        total = sum(rows for rows, _ in self._metrics)
        _, names = self._metrics[0]
        return {
            name: math.fsum(rows * values[name] for rows, values in self._metrics) / total for name in names
        }


class JoinedSlices:
    """Joins what the last stage returned for the slices of a microbatch, and their targets, along time.

    bounds: of the slices of each microbatch that runs.
    """

    def __init__(self, observe: Observe, bounds: Sequence[Sequence[int]]) -> None:
        self._observe = observe
        self._lengths = [[end - start for start, end in pairwise(each)] for each in bounds]
        self._seen: list[tuple[Any, Any]] = []

    def __call__(self, output: Any, target: Any) -> None:
        """Take the next slice. Raises ValueError for an output without a number of tokens."""
        self._seen.append((output, target))
        if len(self._seen) < len(self._lengths[0]):
            return
        outputs, targets = zip(*self._seen, strict=True)
        self._observe(self._joined(outputs), self._joined(targets))
        self._seen.clear()
        del self._lengths[0]

    def _joined(self, slices: Sequence[Any]) -> Any:
        columns = zip(*map(tree_leaves, slices), strict=True)
        return tree_unflatten([*map(self._column, columns)], tree_flatten(slices[0])[1])

    def _column(self, values: Sequence[Any]) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        lengths = [each.shape[1] if each.dim() > 1 else None for each in values]
        if lengths != self._lengths[0]:
            shapes = ", ".join(str(list(each.shape)) for each in values)
            raise ValueError(
                f"the slices of a microbatch have outputs of shapes {shapes}, which can't be joined along "
                "dimension 1: metrics and outputs of such a stage need evaluate_as_one, whose sequences are "
                "whole"
            )
        return torch.cat([*values], dim=1)


def _numbers(found: Any) -> dict[str, float]:
    """What `metrics` returned, as floats. Raises ValueError, with the metric's name, if one is no number."""
    if not isinstance(found, Mapping):
        raise ValueError(f"metrics returned {kind_of(found)}: return a dict, name -> number")
    numbers = {}
    for name, value in found.items():
        if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"the metric {name!r} is {what}: return one number, such as a mean")
        numbers[name] = float(value)
    return numbers


def _kept(value: Any) -> Any:
    # A copy: a stage may write its next output into the same memory.
    return value.detach().clone() if isinstance(value, Tensor) else value


def _joined(values: tuple[Any, ...]) -> Any:
    if not isinstance(values[0], Tensor):
        return None if values[0] is None else list(values)
    if not values[0].dim():
        return torch.stack(values)
    return torch.cat(values) if len({each.shape[1:] for each in values}) == 1 else list(values)


def _rows(output: Any) -> int:
    """How many rows an output has: those of its first tensor that has dimensions; 1 without such a tensor.

    Microbatches of a `per_microbatch` may differ in it.
    """
    sizes = (len(each) for each in tree_leaves(output) if isinstance(each, Tensor) and each.dim())
    return next(sizes, 1)

"""What an evaluation returns beside losses: the last stage's outputs, and metrics of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from zbpp.error_text import kind_of

Metrics = Callable[[Any, Any], Mapping[str, float | Tensor]]


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

        Tensors without dimensions are stacked; None stays None; any other value becomes a list with one
        value per microbatch.
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
    return torch.cat(values) if values[0].dim() else torch.stack(values)


def _rows(output: Any) -> int:
    """How many rows an output has: those of its first tensor that has dimensions; 1 without such a tensor.

    Microbatches of a `per_microbatch` may differ in it.
    """
    sizes = (len(each) for each in tree_leaves(output) if isinstance(each, Tensor) and each.dim())
    return next(sizes, 1)

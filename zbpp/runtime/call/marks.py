"""The marks on arguments of a call: `replicate` and `per_microbatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from zbpp.schedule.order import checked_order

PLAIN = (int, float, complex, str, bytes, type(None))  # bool is an int


class Replicated:
    """A value that every microbatch gets whole; made by `replicate`."""

    def __init__(self, value: Any) -> None:
        self.value = value


def replicate(value: Any) -> Replicated:
    """Mark an argument of `Pipeline.step`, a tensor or what holds tensors, as not to be split along dim 0."""
    if isinstance(value, PLAIN):
        raise TypeError(f"replicate() takes a tensor, not {type(value).__name__}: other values need no mark")
    return Replicated(value)


class PerMicrobatch:
    """One value for each microbatch; made by `per_microbatch`."""

    def __init__(self, values: Sequence[Any], order: Sequence[int] | None) -> None:
        self.values = list(values)
        self.order = None if order is None else tuple(order)


def per_microbatch(values: Sequence[Any], order: Sequence[int] | None = None) -> PerMicrobatch:
    """Mark an argument of `Pipeline.step` as already cut: `values[i]` goes to microbatch i.

    Tensors among them may differ in shape. Each microbatch has the same weight in the mean, whatever its
    size, unless the loss is marked by `zbpp.stage_api.mean_over`. A microbatch is empty where the first
    stage's arguments are None, or tensors without elements: it is left out, and its loss is 0.

    order: in a step, order[i] is the microbatch that goes i-th (`zbpp.order_microbatches`). It is enough to
    give it with one argument of the first stage. Losses come back in the order of `values`, and random
    numbers don't depend on the order. Raises ValueError unless each microbatch is in `order` once, and for
    a mark among the values.
    """
    values = list(values)
    if any(map(is_marked, tree_leaves(values, is_leaf=is_marked))):
        raise ValueError(
            "per_microbatch() has a value in replicate() or per_microbatch(): each value goes whole to its "
            "microbatch, so write it without a mark"
        )
    return PerMicrobatch(values, None if order is None else checked_order(order, len(values)))


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to an argument, or to the values inside its mark. None stays None."""
    if isinstance(value, PerMicrobatch):
        return PerMicrobatch([mapped(function, each) for each in value.values], value.order)
    if isinstance(value, Replicated):
        return Replicated(function(value.value))
    return None if value is None else function(value)


def is_marked(value: Any) -> bool:
    return isinstance(value, (Replicated, PerMicrobatch))

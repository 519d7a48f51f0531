"""Cutting a batch into microbatches, by views along dim 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Replicated:
    """A tensor that every microbatch gets whole; made by `replicate`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def replicate(tensor: Tensor) -> Replicated:
    """Mark a tensor argument of `Pipeline.step` as not to be split along dim 0."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"replicate() takes a tensor, not {type(tensor).__name__}: other values need no mark")
    return Replicated(tensor)


class PerMicrobatch:
    """One value for each microbatch; made by `per_microbatch`."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)


def per_microbatch(values: Sequence[Any]) -> PerMicrobatch:
    """Mark an argument of `Pipeline.step` as cut already: `values[i]` goes to microbatch i.

    Tensors among them may differ in shape; what then differs between stages needs dynamic_shapes. Each
    microbatch counts alike in the mean, whatever its size.
    """
    return PerMicrobatch(values)


def split(name: str, value: Any, num_microbatches: int) -> list[Any]:
    """`num_microbatches` pieces: a tensor's are views, anything unmarked else is given to each as it is.

    Raises ValueError if dim 0 doesn't divide, or for another number of values per microbatch.
    """
    if isinstance(value, PerMicrobatch):
        if len(value.values) != num_microbatches:
            raise ValueError(f"{name} has {len(value.values)} values, num_microbatches={num_microbatches}")
        return value.values
    if isinstance(value, Replicated):
        return [value.tensor] * num_microbatches
    if not isinstance(value, Tensor):
        return [value] * num_microbatches
    if value.dim() == 0:
        raise ValueError(f"{name} is a tensor without dimensions: pass a number, or zbpp.replicate({name})")
    batch = len(value)
    if batch % num_microbatches or not batch:
        raise ValueError(
            f"{name} has {batch} rows, which don't split into num_microbatches={num_microbatches}; "
            f"nearest that do: {_nearest(batch, num_microbatches)}; or zbpp.replicate({name})"
        )
    return list(value.split(batch // num_microbatches))


def split_keywords(values: Mapping[str, Any], num_microbatches: int) -> list[dict[str, Any]]:
    """Per microbatch, its keyword arguments."""
    pieces = {name: split(name, value, num_microbatches) for name, value in values.items()}
    return [{name: each[i] for name, each in pieces.items()} for i in range(num_microbatches)]


def _nearest(batch: int, parts: int) -> str:
    below = batch // parts * parts
    return f"{below}, {below + parts}" if below else str(parts)

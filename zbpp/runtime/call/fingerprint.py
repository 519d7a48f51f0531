"""Fingerprints of a call's arguments: two ranks compare them to see whether they were given the same rows.

    rank 0   x of row 0                     a DistributedSampler gives each rank rows of its own:
    rank 1                target of row 1   a pipeline would train x against the target of another row

The rank with the first stage and the rank with the last one take parts of one batch. Loops mostly give the
whole batch to both. So the first calls tell the fingerprints beside the sizes (sizes.py).
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zbpp.runtime.call.marks import PerMicrobatch, Replicated, is_marked
from zbpp.runtime.digest import digest

NUM_COMPARED = 3  # calls of a pipeline that tell fingerprints: on a GPU each waits for the values
_NUM_VALUES = 4096  # of each tensor, evenly spread


class Fingerprint(NamedTuple):
    """kind: a hash of the tensors' dtypes and shapes. values: a hash of some of their values."""

    kind: int
    values: int

    def is_of_other_values(self, other: Fingerprint) -> bool:
        """Whether the tensors are alike, and their values are not."""
        return self.kind == other.kind and self.values != other.values


def fingerprint_of(value: Any) -> Fingerprint | None:
    """The fingerprint of the tensors in an argument; None without any."""
    found = list(_tensors(value))
    kinds = [(each.dtype, each.shape, each.layout) for each in found]
    values = [int(digest(_some_of(each))) for each in found if _is_plain(each)]
    return Fingerprint(*[zlib.crc32(repr(each).encode()) for each in (kinds, values)]) if found else None


def _some_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _NUM_VALUES)]


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for each in tree_leaves(value, is_leaf=is_marked):
        if isinstance(each, PerMicrobatch | Replicated):
            found += _tensors(each.values if isinstance(each, PerMicrobatch) else each.value)
        elif isinstance(each, Tensor) and not each.is_nested:
            found.append(each)
    return found


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read as bytes."""
    is_dense = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_dense and not (tensor.is_meta or tensor.is_quantized)

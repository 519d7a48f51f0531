"""Which rows of some data are not finite, and which entry is the first of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from zbpp.runtime.mesh import local_of

_SHOWN = 4  # rows


class BadRows(NamedTuple):
    """rows: along dim 0, those that hold NaN, or else an infinity. entry: the first one, such as `[1, 0]`."""

    rows: tuple[int, ...]
    entry: str

    def __str__(self) -> str:
        """`row 1 (entry [1, 0])`, `rows 1, 3 (the first entry: [1, 0])`."""
        shown = ", ".join(map(str, self.rows[:_SHOWN]))
        if len(self.rows) == 1:
            return f"row {shown} (entry {self.entry})"
        more = f" and {len(self.rows) - _SHOWN} more" if len(self.rows) > _SHOWN else ""
        return f"rows {shown}{more} (the first entry: {self.entry})"


@torch.no_grad()
def bad_rows(values: Any) -> BadRows | None:
    """The bad rows of one tensor of the nest `values`; None if all of its tensors are finite.

    The tensor is the first one with a NaN, or, without any NaN, the first one with an infinity.
    """
    leaves = [(path, each) for path, each in tree_flatten_with_path(values)[0] if _is_seen(each)]
    for is_bad in (torch.isnan, torch.isinf):
        for path, each in leaves:
            places = is_bad(each).nonzero()
            if len(places):
                name = f" of {keystr(path)}" if len(leaves) > 1 else ""
                rows = tuple(places[:, 0].unique().tolist())
                return BadRows(rows, f"{places[0].tolist()}{name}")
    return None


def _is_seen(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.dim() or not _is_plain(value):
        return False
    return value.is_floating_point() or value.is_complex()


def _is_plain(value: Tensor) -> bool:
    return local_of(value) is value and not value.is_sparse and value.element_size() > 1

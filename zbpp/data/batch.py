"""A batch taken apart: the positional inputs of stage 0, and the target.

(inputs, target), or more: (x, y, ..., target)       positional inputs in their order, the target last
{"target": ..., "x": ..., "y": ...}                  the target is called target or labels; a single other
                                                     entry is the input, several go to stage 0 by name
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves

_TARGETS = ("target", "labels")


class Source(Protocol):
    """Whole batches by number, the same on every rank."""

    def batch(self, step: int) -> Any: ...


def parts_of(batch: Any) -> tuple[tuple[Any, ...] | dict[str, Any], Any]:
    """(inputs by position or by name, target). Raises ValueError for a batch in none of these forms."""
    if isinstance(batch, Mapping):
        named = [name for name in _TARGETS if name in batch]
        if len(named) != 1 or len(batch) < 2:
            raise ValueError(
                f"a batch has the entries {', '.join(map(str, batch)) or '(none)'}: call one of them "
                f"{' or '.join(_TARGETS)}, the others are the model's inputs"
            )
        return {name: value for name, value in batch.items() if name != named[0]}, batch[named[0]]
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    length = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise ValueError(
        f"a batch is a {type(batch).__name__}{length}: give (inputs, target), or a dict with the target "
        "under target or labels"
    )


def num_rows(batch: Any) -> int | None:
    """The length of dim 0 of the batch's first tensor; None without such a tensor."""
    lengths = (len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    return next(lengths, None)

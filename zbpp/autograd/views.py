"""Chains that only make views of a leaf: W adds to the same view of the leaf's `.grad`.

For a weight used as `w.t()`, W adds to `w.grad.t()`, without a temporary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class View(NamedTuple):
    """The view that one node of such a chain makes. whole: whether the view has every element of its base."""

    apply: Callable[[Tensor], Tensor]
    whole: bool = True


def _signed(dim: int) -> int:
    """The dimension that a node has saved as an unsigned 64-bit number."""
    return dim - 2**64 if dim >= 2**63 else dim


def _transpose(node: Any, _: int) -> View:
    dims = _signed(node._saved_dim0), _signed(node._saved_dim1)
    return View(lambda tensor: tensor.transpose(*dims))


def _permute(node: Any, _: int) -> View:
    dims = tuple(map(_signed, node._saved_dims))
    return View(lambda tensor: tensor.permute(dims))


def _unsqueeze(node: Any, _: int) -> View:
    dim = _signed(node._saved_dim)
    return View(lambda tensor: tensor.unsqueeze(dim))


def _select(node: Any, _: int) -> View:
    dim, index = _signed(node._saved_dim), _signed(node._saved_index)
    return View(lambda tensor: tensor.select(dim, index), whole=False)


MATRIX_TRANSPOSE = View(Tensor.t)

# name of the node -> its View, or the function that makes the View from (node, number of the node's output)
VIEWS: dict[str, View | Callable[[Any, int], View]] = {
    "TBackward0": MATRIX_TRANSPOSE,
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "UnsqueezeBackward0": _unsqueeze,
    "SelectBackward0": _select,
}

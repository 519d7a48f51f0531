"""Chains: what lies between a weight and its use.

Of a chain that only makes views, such as `w.t()`, W adds to the same view of the gradient, `w.grad.t()`,
without a temporary. A chain that COMPUTES, a cast of the weight, say, W runs by autograd, once for all uses
of the weight. B runs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

if TYPE_CHECKING:
    from zbpp.autograd.graph import Edge, WeightUse

# ---- Chains that only make views


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

# ---- Chains that compute

_SHARED = "zbpp: several passes go through this node"


def share_chains(uses: Iterable[WeightUse]) -> None:
    """Mark the nodes of the uses' chains: other passes go through them, so no W frees what they saved.

    The W's of several passes may run in any order, so no W knows that it is the last one. What the nodes have
    saved lives as long as the outputs, or as these W's if they live longer.
    """
    for node in _nodes(uses):
        node.metadata[_SHARED] = True


def _nodes(uses: Iterable[WeightUse]) -> list[Any]:
    return [node for use in uses if use.views is None for node, _ in use.chain]


def run_chains(
    leaf: Tensor, at_head: dict[Edge, Tensor], direct: Tensor | None, uses: Iterable[WeightUse]
) -> Tensor:
    """The gradient of a leaf. The leaf's tensor hooks run at the end.

    at_head: the gradient at the upper end of each chain. direct: the sum of the gradients that start at the
    leaf itself. uses: those of the leaf.
    """
    starts: list[Any] = [GradientEdge(*head) for head in at_head]
    gradients = list(at_head.values())
    if direct is not None:
        starts.append(leaf)
        gradients.append(direct)
    keep = any(_SHARED in node.metadata for node in _nodes(uses))
    try:
        (gradient,) = torch.autograd.grad(starts, leaf, gradients, retain_graph=keep)
    except RuntimeError as error:
        raise _in_our_words(error, leaf) from error
    return gradient


def _in_our_words(error: RuntimeError, leaf: Tensor) -> RuntimeError:
    """The error itself, or one with our own text if another backward has freed a chain."""
    if "backward through the graph a second time" not in str(error):
        return error
    return RuntimeError(
        f"W of a weight of shape {tuple(leaf.shape)} goes through what was computed from this weight alone "
        "(a cast, a Function), and another backward has freed that: run W before that backward, or give that "
        "backward retain_graph=True (backward_input: keep=True)"
    )


def like_output(edge: Edge) -> Tensor:
    """Uninitialised memory for the gradient of a node's output."""
    node: Any = edge[0]
    meta = node._input_metadata[edge[1]]
    return torch.empty(tuple(meta.shape), dtype=meta.dtype, device=meta.device)

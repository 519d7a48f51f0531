"""Chains that COMPUTE: between a weight and its use there are not only views, but a cast, say.

B never runs such a chain. W runs it by autograd, once for all uses of the weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zbpp.autograd.graph import Edge, WeightUse

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
    """The gradient of a leaf.

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

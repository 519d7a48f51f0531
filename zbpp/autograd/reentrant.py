"""Graphs that hold a reentrant torch checkpoint: B runs one plain backward, and nothing is left for W.

Such a checkpoint (`use_reentrant=True`) calls `torch.autograd.backward` in its own backward, and refuses to
run inside `torch.autograd.grad`. The split's pass is such a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from zbpp.autograd.graph import Edge
from zbpp.autograd.node_roles import is_leaf, leaf_tensor


def is_reentrant(node: Any) -> bool:
    """Whether this is the node of a reentrant checkpoint."""
    return type(node).__name__ == "CheckpointFunctionBackward"


def whole_backward(
    roots: Sequence[Any],
    root_grads: list[Tensor],
    inputs: tuple[Any, ...],
    edges: dict[int, Edge],
    wanted: set[int] | None,
    *,
    keep: bool,
) -> tuple[Tensor | None, ...]:
    """Run a plain backward, and return the gradients of the inputs, whose own `.grad` stays as it was.

    keep: whether another pass will follow. edges: position of an input -> its edge. wanted: the ids of the
    parameters that the caller named.
    Raises ValueError if only a part of the graph is asked for: a plain backward stops at leaves only, and it
    adds to the `.grad` of all of them. Raises RuntimeError inside another B, in the recompute of a block.
    """
    if not torch.autograd._is_checkpoint_valid():
        raise RuntimeError(
            "a torch checkpoint with use_reentrant=True runs in a block that zbpp.checkpoint or recompute "
            "computes again: write use_reentrant=False, or do not recompute this block"
        )
    _refuse_part_of_graph(edges, wanted)
    caught: dict[int, Tensor] = {}

    def catch(position: int, output: int, grads: tuple[Tensor, ...]) -> None:
        caught[position] = grads[output]

    handles = [
        node.register_prehook(partial(catch, position, output)) for position, (node, output) in edges.items()
    ]
    leaves = [each for each in inputs if isinstance(each, Tensor) and each.is_leaf]
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        torch.autograd.backward(roots, root_grads, retain_graph=keep)
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad
        for handle in handles:
            handle.remove()
    return tuple(caught.get(position) for position in range(len(inputs)))


def _refuse_part_of_graph(edges: dict[int, Edge], wanted: set[int] | None) -> None:
    partial_requests = [
        f"inputs[{position}] was computed from others"
        for position, (node, _) in edges.items()
        if _has_graph_below(node)
    ]
    if wanted is not None:
        partial_requests.append("parameters are named")
    if partial_requests:
        raise ValueError(
            f"{partial_requests[0]}, but the graph holds a reentrant checkpoint, which allows only a "
            "backward of the whole graph: checkpoint with use_reentrant=False or zbpp.checkpoint, or pass "
            "detached leaves as inputs and parameters=None"
        )


def _has_graph_below(node: Node) -> bool:
    """Whether a plain backward would go on below this input and change a `.grad` there.

    An input that was computed in one operation from plain tensors, not from Parameters, does no harm.
    """
    return not is_leaf(node) and any(
        below is not None and not (is_leaf(below) and type(leaf_tensor(below)) is Tensor)
        for below, _ in node.next_functions
    )

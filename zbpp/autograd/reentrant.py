"""Graphs that hold a reentrant checkpoint: B runs one plain backward, and nothing but hooks is left for W.

Such a checkpoint (torch's with `use_reentrant=True`, or a library's own) calls `torch.autograd.backward` in
its own backward, and refuses to run inside `torch.autograd.grad`. The split's pass is such a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from zbpp.autograd.graph import Edge, Survey
from zbpp.autograd.hooked_leaves import grouped
from zbpp.autograd.hooks import hooked_nodes, without_hooks
from zbpp.autograd.leaf_grad import engine_adds_to_main_grad, set_aside
from zbpp.autograd.node_roles import is_leaf, leaf_tensor
from zbpp.autograd.references import references
from zbpp.autograd.weight_grads import ComputedTask, Task


class _ReentrantOfType(dict[type, bool]):
    """type of a Function's node -> whether its backward asks autograd if a checkpoint may run in this pass.

    Autograd's answer is no inside `torch.autograd.grad`. Only a Function that needs a plain backward asks.
    """

    def __missing__(self, cls: Any) -> bool:
        backward = inspect.unwrap(cls._forward_cls.backward)
        code = getattr(backward, "__code__", None)
        self[cls] = code is not None and any("_is_checkpoint_valid" in names for names in _names(code))
        return self[cls]


def _names(code: CodeType) -> Iterator[tuple[str, ...]]:
    """The names that a function refers to, and those of the functions inside it."""
    yield code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


_reentrant_of_type = _ReentrantOfType()


def is_reentrant(node: Any) -> bool:
    """Whether this is the node of a reentrant checkpoint."""
    return _reentrant_of_type[type(node)]


def whole_backward(
    roots: Sequence[Any],
    root_grads: list[Tensor],
    inputs: tuple[Any, ...],
    edges: dict[int, Edge],
    wanted: set[int] | None,
    found: Survey,
    *,
    keep: bool,
) -> tuple[tuple[Tensor | None, ...], list[Task]]:
    """Run a plain backward. Returns the gradients of the inputs, and the tasks of leaves with hooks.

    keep: whether another pass will follow. edges: position of an input -> its edge. wanted: the ids of the
    parameters that the caller named. found: what the walk has found.
    The gradient of a leaf without hooks is added to its `main_grad` or `.grad` now; inputs' own stay as they
    were. Raises ValueError if only a part of the graph is asked for: a plain backward stops at leaves only,
    and it adds to the gradients of all of them. Raises RuntimeError inside another B, in the recompute of a
    block.
    """
    if not torch.autograd._is_checkpoint_valid():
        raise RuntimeError(
            "a torch checkpoint with use_reentrant=True runs in a block that zbpp.checkpoint or recompute "
            "computes again: write use_reentrant=False, or do not recompute this block"
        )
    _refuse_part_of_graph(edges, wanted)
    caught: dict[int, Tensor] = {}

    def catch(position: int, output: int, grads: tuple[Tensor, ...]) -> None:
        # A checkpoint's own backward arrives here, too, by a tensor that its function closes over.
        caught[position] = caught[position] + grads[output] if position in caught else grads[output]

    handles = [
        node.register_prehook(partial(catch, position, output)) for position, (node, output) in edges.items()
    ]
    try:
        tasks = _backward(roots, root_grads, [each for each in inputs if _is_leaf(each)], found, keep=keep)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(caught.get(position) for position in range(len(inputs))), tasks


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_leaf


def _backward(
    roots: Sequence[Any], root_grads: list[Tensor], inputs: list[Tensor], found: Survey, *, keep: bool
) -> list[Task]:
    """The plain backward. The gradients of leaves with hooks become tasks, so that W runs their hooks."""
    leaves = [each for each in _leaves(found) if all(each is not own for own in inputs)]
    hooked = hooked_nodes(leaves)
    own = [leaf_tensor(node) for node in hooked.values()]
    with without_hooks(hooked.values()), set_aside([*own, *inputs]), engine_adds_to_main_grad(leaves):
        torch.autograd.backward(roots, root_grads, retain_graph=keep)
        tasks: list[Task] = [
            ComputedTask(leaf, leaf.grad, leaf.grad._version) for leaf in own if leaf.grad is not None
        ]
    reached = {id(each.leaf) for each in tasks} | found.hooked.keys()
    return grouped(tasks, {key: node for key, node in hooked.items() if key in reached})


def _leaves(found: Survey) -> list[Tensor]:
    """The leaves of the graph, and those that its Functions refer to: a checkpoint's function uses some."""
    known = [*found.computed_in_b.values(), *(each.leaf for each in found.uses)]
    for each in references([list(vars(node).values()) for node in found.functions], with_globals=True):
        known += each.parameters() if isinstance(each, nn.Module) else [each]
    leaves = {id(each): each for each in known if each.is_leaf and each.requires_grad}
    return [*leaves.values()]


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

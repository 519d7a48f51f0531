"""Hooks that users register on leaves and on nodes: which leaves have some, and taking them off."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zbpp.autograd.node_roles import leaf_tensor


class _Looked:
    """What was found when hooks were looked for last.

    handles: how many handles the looking itself has made. num_made: how many hooks the process had registered
    by then. without: the ids of leaves that had none. As long as no further hook is registered, the ids hold:
    a new tensor at the place of an old one has no hooks either.
    """

    def __init__(self) -> None:
        self.handles, self.num_made = 0, 0
        self.without: set[int] = set()


_looked = _Looked()  # of the process, as torch's count of handles is


def num_hooks_made() -> int:
    """How many hooks this process has registered so far: every handle takes the next number."""
    return RemovableHandle.next_id - _looked.handles


def hooks_of_node(node: Node) -> Iterator[dict[int, Any]]:
    """The dictionaries of a node's prehooks and of its hooks.

    Torch shows a node's hooks only to the handle of a further hook, so one is registered and removed again.
    """
    for register in (node.register_prehook, node.register_hook):
        handle = register(_no_hook)
        _looked.handles += 1
        hooks: dict[int, Any] = handle.hooks_dict_ref() or {}
        hooks.pop(handle.id, None)  # handle.remove() takes longer, and B asks this of every site
        yield hooks


def _no_hook(*_: Any) -> None:
    """Never called."""


def has_node_hooks(node: Node) -> bool:
    """Whether hooks were registered on the node itself, not on its tensors."""
    return any(hooks_of_node(node))


def node_of(leaf: Tensor) -> Node:
    """The AccumulateGrad node of a leaf that requires grad."""
    return get_gradient_edge(leaf).node


def hooked_nodes(leaves: Collection[Tensor], nodes: Iterable[Node] | None = None) -> dict[int, Node]:
    """The AccumulateGrad nodes of the leaves that have hooks of any kind: {id of the leaf: node}.

    nodes: those of all these leaves, if they are at hand. Asked in every B: where all leaves are known to
    have no hooks, this costs one comparison of sets.
    """
    if num_hooks_made() == _looked.num_made:
        if _looked.without.issuperset(map(id, leaves)):
            return {}
    else:
        _looked.without.clear()
    found = {}
    for leaf, node in zip(leaves, map(node_of, leaves) if nodes is None else nodes, strict=True):
        if id(leaf) in _looked.without:
            continue
        if has_own_hooks(leaf) or has_node_hooks(node):
            found[id(leaf)] = node
        else:
            _looked.without.add(id(leaf))
    _looked.num_made = num_hooks_made()
    return found


class Internal:
    """Base class of keys by which zbpp itself puts a hook into a leaf's dictionary of hooks."""


class TakenOff(OrderedDict[Any, Any]):
    """In place of the tensor hooks of a leaf whose hooks are taken off: the leaf still counts as hooked."""


def has_own_hooks(leaf: Tensor) -> bool:
    """Whether a leaf has tensor hooks or post-accumulate hooks of somebody else than zbpp."""
    hooks = leaf._backward_hooks
    return isinstance(hooks, TakenOff) or _has_own(hooks) or has_post_accumulate_hooks(leaf)


def has_post_accumulate_hooks(leaf: Tensor) -> bool:
    """Whether a leaf has post-accumulate hooks of somebody else than zbpp."""
    return _has_own(leaf._post_accumulate_grad_hooks)


def _has_own(hooks: Iterable[Any] | None) -> bool:
    return bool(hooks) and any(not isinstance(key, Internal) for key in hooks or ())


@contextmanager
def without_hooks(nodes: Iterable[Node]) -> Iterator[None]:
    """Take off the hooks of AccumulateGrad nodes and of their leaves; put them back at the end."""
    before = []
    for node in nodes:
        leaf = leaf_tensor(node)
        of_node = [(hooks, dict(hooks)) for hooks in hooks_of_node(node)]
        before.append((leaf, leaf._backward_hooks, leaf._post_accumulate_grad_hooks, of_node))
        leaf._backward_hooks = TakenOff()
        leaf._post_accumulate_grad_hooks = {}  # autograd does not accept None for no hooks
        for hooks, _ in of_node:
            hooks.clear()
    try:
        yield
    finally:
        for leaf, tensor_hooks, post_accumulate, of_node in before:
            leaf._backward_hooks = tensor_hooks
            leaf._post_accumulate_grad_hooks = post_accumulate or {}
            for hooks, own in of_node:
                hooks.update(own)


class MultiGradHook(NamedTuple):
    """A leaf's part in a hook by `register_multi_grad_hook`.

    lock: the same object in all tensors of one such hook. nodes: of all its tensors; () in mode "any".
    """

    lock: Any
    nodes: Sequence[Node]


def multi_grad_hooks(leaf: Tensor) -> Iterator[MultiGradHook]:
    """The multi-grad hooks that watch a leaf. Torch registers closures of its own as tensor hooks."""
    for hook in (leaf._backward_hooks or {}).values():
        if getattr(hook, "__globals__", None) is vars(torch.autograd.graph):
            cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
            found = {name: cell.cell_contents for name, cell in cells}
            yield MultiGradHook(found.get("lock"), found.get("grad_fns", ()))

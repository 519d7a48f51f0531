"""Hooks that users register on tensors and nodes: finding out about them, and running them in W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle


def num_hooks_made() -> int:
    """How many hooks this process has registered so far: every handle takes the next number."""
    return RemovableHandle.next_id


def has_node_hooks(node: Node) -> bool:
    """Whether hooks were registered on the node itself, not on its tensors.

    Torch shows a node's hooks only to the handle of a further hook, so one is registered and removed again.
    """
    for register in (node.register_prehook, node.register_hook):
        handle = register(_no_hook)
        hooks = handle.hooks_dict_ref() or {}
        hooks.pop(handle.id, None)  # handle.remove() takes longer, and B asks this of every site
        if hooks:
            return True
    return False


def _no_hook(*_: Any) -> None:
    """Never called."""


def run_hooks(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Run a leaf's tensor hooks on the gradient of one microbatch; returns the gradient after these hooks."""
    hooks: dict[int, Callable[[Tensor], Tensor | None]] = leaf._backward_hooks or {}
    for hook in list(hooks.values()):
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    return gradient


def run_post_accumulate_hooks(leaf: Tensor) -> None:
    """Run a leaf's post-accumulate-grad hooks."""
    hooks: dict[int, Callable[[Tensor], None]] = leaf._post_accumulate_grad_hooks or {}
    for hook in list(hooks.values()):
        hook(leaf)

"""Hooks that a B and its W look after: those on nodes, and those on leaves, which W runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle


def num_hooks_made() -> int:
    """By this process, on tensors, nodes or modules: each takes the next number for its handle."""
    return RemovableHandle.next_id


def has_node_hooks(node: Node) -> bool:
    """Whether hooks were registered on the node itself, not on its tensors.

    Torch shows them to none but the handle of one more.
    """
    for register in (node.register_prehook, node.register_hook):
        with register(_no_hook) as handle:
            if len(handle.hooks_dict_ref() or ()) > 1:
                return True
    return False


def _no_hook(*_: Any) -> None:
    """Never called."""


def run_hooks(leaf: Tensor, gradient: Tensor) -> Tensor:
    """A leaf's tensor hooks see, and may replace, the microbatch's gradient."""
    hooks: dict[int, Callable[[Tensor], Tensor | None]] = leaf._backward_hooks or {}
    for hook in list(hooks.values()):
        try:
            replaced = hook(gradient)
        except AssertionError as error:
            raise multi_grad_hook(error) from error
        gradient = gradient if replaced is None else replaced
    return gradient


def multi_grad_hook(error: Exception) -> Exception:
    """Torch's word on a hook for several leaves, in ours; any other error as it is."""
    if not any(said in str(error) for said in ("inside a backward call", "_will_engine_execute_node")):
        return error
    return RuntimeError(
        "register_multi_grad_hook on parameters needs one backward that computes all their gradients, and W "
        "computes these one by one: use register_hook or register_post_accumulate_grad_hook on each parameter"
    )


def run_post_accumulate_hooks(leaf: Tensor) -> None:
    hooks: dict[int, Callable[[Tensor], None]] = leaf._post_accumulate_grad_hooks or {}
    for hook in list(hooks.values()):
        hook(leaf)

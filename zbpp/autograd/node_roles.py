"""What each type of autograd node means for the walk in graph.py: looked up by name once, then by type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from zbpp.autograd.rules import rule_of
from zbpp.autograd.views import VIEWS


class _RoleOfType(dict[type, Any]):
    """type of node -> "leaf" | "function" (a Python autograd Function) | its Rule | None."""

    def __missing__(self, cls: type) -> Any:
        if cls.__name__ == "AccumulateGrad":
            self[cls] = "leaf"
        else:
            self[cls] = rule_of(cls.__name__) or ("function" if issubclass(cls, BackwardCFunction) else None)
        return self[cls]


class _ViewOfType(dict[type, Any]):
    """type of node -> its View, or the function that makes the View from an edge, or None: see views.py."""

    def __missing__(self, cls: type) -> Any:
        self[cls] = VIEWS.get(cls.__name__)
        return self[cls]


role_of_type = _RoleOfType()
view_of_type = _ViewOfType()


def _function_nodes_live() -> bool:
    """Whether a Python Function's node lives as long as Python refers to it. In torch 2.11 it does not."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

    node: Any = Same.apply(torch.empty(0, requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]  # torch's
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


FUNCTION_NODES_LIVE = _function_nodes_live()
"""Whether a chain may begin with a Function's node: the node must live until W, when the graph is gone."""


def node_name(node: Node) -> str:
    """`AddmmBackward0`: the name that a rule is registered for."""
    return type(node).__name__


def changes_no_gradient(node: Any) -> bool:
    """Whether a Function says of itself that its backward changes no gradient in place.

    B then needs no GradientGuard for it.
    """
    return getattr(type(node)._forward_cls, "changes_no_gradient", False)


def is_leaf(node: Node) -> bool:
    """Whether gradients that reach this node accumulate into a leaf tensor."""
    return role_of_type[type(node)] == "leaf"


def leaf_tensor(node: Any) -> Tensor:
    """The leaf tensor of an AccumulateGrad node."""
    tensor: Tensor = node.variable
    return tensor

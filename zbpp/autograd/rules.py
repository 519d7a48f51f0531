"""Per kind of autograd node: what W needs of it, and how W computes the weight's gradient.

A rule is one function. It looks at a node BEFORE the backward pass runs, while its saved
tensors are still there, and says for one operand what to keep and how to add that operand's
gradient to a target once dy, the gradient of the node's output, is known:

    @rule("MmBackward0", weights=(1, 0))
    def _mm(node, operand):
        return Capture((saved(node, "self"),), _add_left_product)

Returning None leaves the operand to B. To teach zbpp a new node, register a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

Add = Callable[[Tensor, tuple[Tensor, ...], Tensor, bool], None]


class Capture(NamedTuple):
    """What W keeps for one operand of one node.

    held: tensors to keep until W, detached.
    add(target, held, dy, fresh): adds the operand's gradient to `target`, which has the
    operand's shape; if `fresh`, target is uninitialised memory and is overwritten.
    """

    held: tuple[Tensor, ...]
    add: Add


class Rule(NamedTuple):
    """capture(node, operand) for the operands (indices into next_functions) of one kind of node.

    weights: operands that may be the weight, preferred first.
    along: operands deferred only together with a weight, since they need nothing but dy.
    """

    capture: Callable[[Any, int], Capture | None]
    weights: tuple[int, ...]
    along: tuple[int, ...] = ()


RULES: dict[str, Rule] = {}


def rule(
    name: str, *, weights: tuple[int, ...], along: tuple[int, ...] = ()
) -> Callable[[Callable[[Any, int], Capture | None]], Callable[[Any, int], Capture | None]]:
    """Register a rule for the nodes whose `name()` is `name`; see the module's head."""

    def register(capture: Callable[[Any, int], Capture | None]) -> Callable[[Any, int], Capture | None]:
        RULES[name] = Rule(capture, weights, along)
        return capture

    return register


def saved(node: Node, name: str) -> Tensor | None:
    """A tensor that a node saved, without its history; None if hooks packed it away.

    Detached, since a saved activation carries the graph above it.
    """
    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:
        return None
    tensor: Tensor = getattr(node, f"_saved_{name}")
    return tensor.detach()


def _keep(tensor: Tensor | None, add: Add) -> Capture | None:
    return None if tensor is None else Capture((tensor,), add)


# Linear layers: y = a @ b, dy known.  d b = a.T @ dy,  d a = dy @ b.T.
# The product accumulates straight into the target: no temporary the size of the weight.


def _add_left_product(target: Tensor, held: tuple[Tensor, ...], dy: Tensor, fresh: bool) -> None:
    target.addmm_(held[0].t(), dy, beta=0 if fresh else 1)


def _add_right_product(target: Tensor, held: tuple[Tensor, ...], dy: Tensor, fresh: bool) -> None:
    target.addmm_(dy, held[0].t(), beta=0 if fresh else 1)


@rule("MmBackward0", weights=(1, 0))
def _mm(node: Any, operand: int) -> Capture | None:
    if operand == 1:
        return _keep(saved(node, "self"), _add_left_product)
    return _keep(saved(node, "mat2"), _add_right_product)


@rule("AddmmBackward0", weights=(2, 1), along=(0,))
def _addmm(node: Any, operand: int) -> Capture | None:
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    if operand == 0:
        return Capture((), _add_sum)
    if operand == 2:
        return _keep(saved(node, "mat1"), _add_left_product)
    return _keep(saved(node, "mat2"), _add_right_product)


def _add_sum(target: Tensor, held: tuple[Tensor, ...], dy: Tensor, fresh: bool) -> None:
    """A bias was broadcast: its gradient is dy summed over the dimensions that it lacks."""
    total = dy.sum_to_size(target.shape)
    if fresh:
        target.copy_(total)
    else:
        target.add_(total)


@rule("EmbeddingBackward0", weights=(0,))
def _embedding(node: Any, operand: int) -> Capture | None:
    if node._saved_sparse or node._saved_scale_grad_by_freq:
        return None
    indices = saved(node, "indices")
    if indices is None:
        return None
    padding = node._saved_padding_idx  # of a C++ type that wraps -1 around to 2**64 - 1
    return Capture((indices,), _add_rows if padding in (-1, 2**64 - 1) else _AddRowsBut(padding))


def _add_rows(target: Tensor, held: tuple[Tensor, ...], dy: Tensor, fresh: bool) -> None:
    if fresh:
        target.zero_()
    target.index_add_(0, held[0].reshape(-1), dy.reshape(-1, dy.shape[-1]))


class _AddRowsBut:
    """As `_add_rows`, but the padding row gets no gradient."""

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, target: Tensor, held: tuple[Tensor, ...], dy: Tensor, fresh: bool) -> None:
        rows = torch.where((held[0] == self.padding).unsqueeze(-1), 0, dy)
        _add_rows(target, held, rows, fresh)

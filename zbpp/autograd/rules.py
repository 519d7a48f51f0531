"""One rule per kind of autograd node: what W needs of the node, and how W computes the weight's gradient.

A rule is one function. It looks at a node BEFORE the backward pass runs, while the node's saved tensors are
still there. For one operand it says which tensors to keep, and how to add the operand's gradient to a target
once dy, the gradient of the node's output, is known. For y = a @ b:

    @rule("MmBackward0", weights=(1,))
    def mm(node, operand):
        return keep(saved(node, "self"), add_left_product)      # d b = a.H @ dy

A rule that returns None leaves the operand to B. To teach zbpp a new kind of node, register a rule;
to teach it weights of a subclass of Tensor, see `register_subclass`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.autograd.adding import add_grouped_product, add_or_copy, add_product, add_rows
from zbpp.autograd.capture import Add, Capture, HeldTensors, keep, saved
from zbpp.autograd.views import View


class DirectCapture(NamedTuple):
    """A Capture described as data: one tensor that the node saved, and how to add the gradient.

    The walk is on the hot path: instead of calling the rule, it reads the node's attributes by these names.
    add_transposed: takes the place of `add` if the operand is the transpose of a leaf; adds to the gradient
    of the leaf itself.
    """

    name: str  # of the saved tensor: "mat2"
    add: Add
    add_transposed: Add
    raw_attribute: str  # of the node: "_raw_saved_mat2"
    attribute: str  # "_saved_mat2"


ShardTable = Mapping[int | None, tuple[int | None, int | None]]
"""Which shards of the kept tensor and of dy give a shard of an operand's gradient, without communication.

dimension along which the operand is sharded -> (the kept tensor's, dy's); None stands for a tensor that is
replicated. The two shards must give the operand's shard of the gradient, not one term of a sum over ranks.
"""


class Rule(NamedTuple):
    """capture(node, operand), for the operands (indices into next_functions) of one kind of node.

    weights: operands that may be the weight, preferred ones first.
    along: operands (biases) that wait only if a weight of the node waits, for W then holds dy, all they need.
    direct: operand -> what `capture` returns for it, as data.
    shards: operand -> how W can compute the gradient from shards, see `ShardTable`; none by default.
    ready(node): whether the rule holds for this node; None if it always does.
    """

    capture: Callable[[Any, int], Capture | None]
    weights: tuple[int, ...]
    along: tuple[int, ...] = ()
    direct: Mapping[int, DirectCapture] = MappingProxyType({})
    shards: Mapping[int, ShardTable] = MappingProxyType({})
    ready: Callable[[Any], bool] | None = None


_RULES: dict[str, Rule] = {}
_Capturing = Callable[[Any, int], Capture | None]


def rule(
    name: str,
    *,
    weights: tuple[int, ...],
    along: tuple[int, ...] = (),
    shards: Mapping[int, ShardTable] = MappingProxyType({}),
) -> Callable[[_Capturing], _Capturing]:
    """Register a rule for the nodes whose class is called `name`; see the module's docstring.

    weights, along, shards: as in `Rule`. Register it before the first backward that meets such a node.
    """

    def register(capture: _Capturing) -> _Capturing:
        _RULES[name] = Rule(capture, weights, along, shards=shards)
        return capture

    return register


def rule_of(name: str) -> Rule | None:
    """The rule for nodes of this name."""
    return _RULES.get(name)


def name_of(rule: Rule) -> str:
    """The name of the nodes that a rule is registered for."""
    return next(name for name, each in _RULES.items() if each is rule)


# ---- Weights of a subclass of Tensor

CaptureOfSubclass = Callable[[Any, Rule, int, Any, tuple[View, ...] | None], Capture | None]
"""(node, rule, operand, leaf, views) -> what W needs of the node; None leaves the operand to B.

views: those in the chain from the operand to the leaf, None if the chain computes. The Capture's `add` adds
to the gradient of the leaf itself. If it is an AddOfParts, W holds what its `placed` makes of dy.
"""

_SUBCLASSES: list[CaptureOfSubclass] = []


def register_subclass(capture: CaptureOfSubclass) -> None:
    """Let `capture` decide about the leaves of a subclass of Tensor; it returns None for all other leaves.

    B computes the gradients of subclasses that nothing is registered for.
    """
    _SUBCLASSES.append(capture)


def capture_of_subclass(
    node: Any, rule: Rule, operand: int, leaf: Tensor, views: tuple[View, ...] | None
) -> Capture | None:
    """The first Capture that one of the registered functions returns."""
    captures = (capture(node, rule, operand, leaf, views) for capture in _SUBCLASSES)
    return next((each for each in captures if each is not None), None)


# ---- Products: y = a @ b, so d b = a.H @ dy and d a = dy @ b.H; of real numbers a.H is a.T.
# adding.py accumulates the product straight into the target.


def add_left_product(target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
    """target += a.H @ dy, held = (a,)."""
    add_product(target, held[0].mH, dy, fresh)


def add_right_product(target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
    """target += dy @ b.H, held = (b,)."""
    add_product(target, dy, held[0].mH, fresh)


def _add_left_product_transposed(target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
    add_product(target, dy.mT, held[0].conj(), fresh)


def _add_right_product_transposed(target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
    add_product(target, held[0].conj(), dy.mT, fresh)


# For y = a @ b with matrices a and b. If an operand is sharded along the dimension that the product sums
# over, the other factor must be, too. If it is sharded along the dimension that it shares with y, dy must be.
_RIGHT_SHARDS: ShardTable = {None: (None, None), 0: (1, None), 1: (None, 1)}
_LEFT_SHARDS: ShardTable = {None: (None, None), 0: (None, 0), 1: (0, None)}
_BIAS_SHARDS: ShardTable = {None: (None, None), 0: (None, 1)}  # a vector, added to each row of y


def _product_rule(name: str, left: str, right: str, *, plus: bool = False) -> None:
    """Register the rule of a product. left, right: the names under which the node saves the two factors.

    plus: the node adds the product to a bias, its first operand. The rule holds only if neither the bias nor
    the product is scaled (alpha = beta = 1).
    """

    def capture(node: Any, operand: int) -> Capture | None:
        if operand not in direct:
            return Capture((), _add_sum)
        return keep(saved(node, direct[operand].name), direct[operand].add)

    left_operand, right_operand = (1, 2) if plus else (0, 1)
    # The gradient of the right operand needs the left factor, and the other way round.
    direct = {
        right_operand: _direct(left, add_left_product, _add_left_product_transposed),
        left_operand: _direct(right, add_right_product, _add_right_product_transposed),
    }
    shards = {right_operand: _RIGHT_SHARDS, left_operand: _LEFT_SHARDS}
    if plus:
        _RULES[name] = Rule(capture, tuple(direct), (0,), direct, {0: _BIAS_SHARDS, **shards}, _is_unscaled)
    else:
        _RULES[name] = Rule(capture, tuple(direct), (), direct, shards)


def _direct(name: str, add: Add, add_transposed: Add) -> DirectCapture:
    return DirectCapture(name, add, add_transposed, f"_raw_saved_{name}", f"_saved_{name}")


def _is_unscaled(node: Any) -> bool:
    unscaled: bool = node._saved_alpha == node._saved_beta == 1
    return unscaled


_product_rule("MmBackward0", "self", "mat2")
_product_rule("BmmBackward0", "self", "mat2")
_product_rule("AddmmBackward0", "mat1", "mat2", plus=True)
_product_rule("BaddbmmBackward0", "batch1", "batch2", plus=True)


def _add_sum(target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
    """A bias was broadcast: its gradient is dy, summed over the dimensions that the bias lacks."""
    add_or_copy(target, dy.sum_to_size(target.shape), fresh)


@rule("GroupedMmBackward0", weights=(1,))
def _grouped_product(node: Any, operand: int) -> Capture | None:
    """Mixture of experts: rows offs[e-1] to offs[e] of x times the weight of expert e."""
    if len(node._saved_self_sym_sizes) != 2 or len(node._saved_mat2_sym_sizes) != 3:
        return None
    return keep((saved(node, "self"), saved(node, "offs")), _add_grouped_product)


def _add_grouped_product(target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
    x, offs = held
    add_grouped_product(target, x, dy, offs, fresh)


# ---- Convolutions, of any dimension, transposed and grouped


@rule("ConvolutionBackward0", weights=(1,), along=(2,))
def _convolution(node: Any, operand: int) -> Capture | None:
    if operand == 2:
        return Capture((), _add_channel_sum)
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return keep(saved(node, "input"), _AddConvolution([getattr(node, "_saved_" + name) for name in names]))


def _add_channel_sum(target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
    add_or_copy(target, dy.sum([0, *range(2, dy.dim())]), fresh)


class _AddConvolution:
    def __init__(self, settings: list[Any]) -> None:
        self.settings = settings

    def __call__(self, target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
        # The operation reads the shape and the layout of its weight operand, not the values.
        like = target if target.dtype == dy.dtype else torch.empty_like(target, dtype=dy.dtype)
        wanted = [False, True, False]
        _, gradient, _ = torch.ops.aten.convolution_backward(dy, held[0], like, None, *self.settings, wanted)
        add_or_copy(target, gradient, fresh)


# ---- Embeddings


@rule("EmbeddingBackward0", weights=(0,), shards={0: {None: (None, None), 1: (None, -1)}})
def _embedding(node: Any, operand: int) -> Capture | None:
    if node._saved_sparse or node._saved_scale_grad_by_freq:
        return None
    return keep(saved(node, "indices"), _AddRows(node._saved_padding_idx))


class _AddRows:
    """Adds each row of dy to the row of its index; the row of the padding index gets nothing."""

    def __init__(self, padding: int) -> None:
        self.padding = padding  # none: -1, which nodes save as an unsigned 64-bit number

    def __call__(self, target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
        (indices,) = held
        if fresh:
            target.zero_()
        add_rows(target, indices, dy, self.padding)

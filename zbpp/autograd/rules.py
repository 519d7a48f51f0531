"""Per kind of autograd node: what W needs of it, and how W computes the weight's gradient.

A rule is one function. It looks at a node BEFORE the backward pass runs, while its saved
tensors are still there, and says for one operand what to keep and how to add that operand's
gradient to a target once dy, the gradient of the node's output, is known. For y = a @ b:

    @rule("MmBackward0", weights=(1, 0))
    def mm(node, operand):
        return keep(saved(node, "self"), add_left_product)      # d b = a.H @ dy

Returning None leaves the operand to B. To teach zbpp a new node, register a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

Held = tuple[Any, ...]
Add = Callable[[Tensor, Held, Tensor, bool], None]


class Capture(NamedTuple):
    """What W keeps for one operand of one node.

    held: tensors to keep until W, detached (or packed: see `Packed`).
    add(target, held, dy, fresh): adds the operand's gradient to `target`, which has the
    operand's shape; if `fresh`, target is uninitialised memory and is overwritten.
    """

    held: Held
    add: Add


class Kept(NamedTuple):
    """For an operand whose gradient needs just one saved tensor of the node: which, and how to add.

    transposed: how to add it to the gradient of a leaf whose transpose the operand is.
    """

    name: str
    add: Add
    transposed: Add
    raw: str  # the attributes of the node that hold it
    saved: str


class Rule(NamedTuple):
    """capture(node, operand) for the operands (indices into next_functions) of one kind of node.

    weights: operands that may be the weight, preferred first.
    along: operands deferred only together with a weight, since they need nothing but dy.
    kept: what capture does for an operand, as data: the walk, which is in a hurry, reads it directly.
    ready(node): whether the rule holds for this node; None if it always does.
    """

    capture: Callable[[Any, int], Capture | None]
    weights: tuple[int, ...]
    along: tuple[int, ...] = ()
    kept: Mapping[int, Kept] = MappingProxyType({})
    ready: Callable[[Any], bool] | None = None


class Packed(NamedTuple):
    """A saved tensor that hooks packed away; W unpacks it, not B."""

    data: Any
    unpack_hook: Callable[[Any], Tensor]

    def tensors(self) -> list[Tensor]:
        """The tensors inside."""
        return [leaf for leaf in tree_leaves(self.data) if isinstance(leaf, Tensor)]

    @property
    def _version(self) -> int:
        """As a tensor's: it grows when one inside is changed in place."""
        return version_of(self.tensors())


def version_of(held: Iterable[Any]) -> int:
    """One number that grows whenever one of these is changed in place: autograd counts for each tensor."""
    return sum([each._version for each in held])


_RULES: dict[str, Rule] = {}
_Capturing = Callable[[Any, int], Capture | None]


def rule(
    name: str, *, weights: tuple[int, ...], along: tuple[int, ...] = ()
) -> Callable[[_Capturing], _Capturing]:
    """Register a rule for the nodes whose class is called `name`; see the module's head.

    To be called before the first backward that meets such a node.
    """

    def register(capture: _Capturing) -> _Capturing:
        _RULES[name] = Rule(capture, weights, along)
        return capture

    return register


def rule_of(name: str) -> Rule | None:
    """The rule for nodes of this name."""
    return _RULES.get(name)


def name_of(rule: Rule) -> str:
    """The name of the nodes that a rule is for."""
    return next(name for name, each in _RULES.items() if each is rule)


def saved(node: Node, name: str) -> Tensor | Packed | None:
    """A tensor that a node saved, without its history.

    Detached, since a saved activation carries the graph above it. What save_on_cpu packed stays
    packed until W. None for other hooks: to unpack a checkpoint's early is to recompute early; and
    for a sparse tensor, whose products are few kinds: autograd knows them.
    """
    raw = getattr(node, "_raw_saved_" + name)
    hook = raw.unpack_hook
    if hook is None:
        tensor: Tensor = getattr(node, "_saved_" + name)
        return tensor.detach() if tensor.layout is torch.strided else None
    if getattr(hook, "__qualname__", "").startswith("save_on_cpu."):
        return Packed(raw.data, hook)
    return None


def saved_by(node: Any) -> Iterator[Tensor]:
    """All tensors that a node has saved; what hooks have packed stays packed."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            for each in raw if isinstance(raw, tuple) else (raw,):
                yield from Packed(each.data, each.unpack_hook).tensors()


def keep(tensors: Tensor | Packed | tuple[Tensor | Packed | None, ...] | None, add: Add) -> Capture | None:
    """A capture of one saved tensor, or of several; None if one can't be had."""
    held = tensors if type(tensors) is tuple else (tensors,)
    if any(each is None for each in held):
        return None
    return Capture(held, _UnpackingAdd(add) if any(isinstance(each, Packed) for each in held) else add)


class _UnpackingAdd:
    """`add`, for which W unpacks what is held."""

    def __init__(self, add: Add) -> None:
        self.add = add

    def __call__(self, target: Tensor, held: Held, dy: Tensor, fresh: bool) -> None:
        unpacked = [each.unpack_hook(each.data) if isinstance(each, Packed) else each for each in held]
        self.add(target, tuple(unpacked), dy, fresh)


def add_or_copy(target: Tensor, gradient: Tensor, fresh: bool) -> None:
    """For rules that can't help making a temporary."""
    if fresh:
        target.copy_(gradient)
    else:
        target.add_(gradient)


# ---- Products: y = a @ b, so d b = a.H @ dy and d a = dy @ b.H; of real numbers a.H is a.T.
# They accumulate straight into the target: no temporary the size of the weight.


def _add_product(target: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    if target.dtype != left.dtype:
        _add_widened(target, left, right, fresh)
    elif target.dim() == 3:
        target.baddbmm_(left, right, beta=0 if fresh else 1)
    elif fresh:
        torch.mm(left, right, out=target)
    else:
        target.addmm_(left, right)


def _add_widened(target: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """A product of bf16 factors summed into float32: rounded once, at the end."""
    if left.is_cuda and target.dim() == 2:
        product = torch.mm(left, right, out_dtype=target.dtype)
    else:  # that kernel exists on CUDA only
        product = left.to(target.dtype) @ right.to(target.dtype)
    add_or_copy(target, product, fresh)


def add_left_product(target: Tensor, held: Held, dy: Tensor, fresh: bool) -> None:
    """target += a.H @ dy, held = (a,)."""
    _add_product(target, held[0].mH, dy, fresh)


def add_right_product(target: Tensor, held: Held, dy: Tensor, fresh: bool) -> None:
    """target += dy @ b.H, held = (b,)."""
    _add_product(target, dy, held[0].mH, fresh)


def _add_left_product_transposed(target: Tensor, held: Held, dy: Tensor, fresh: bool) -> None:
    _add_product(target, dy.mT, held[0].conj(), fresh)


def _add_right_product_transposed(target: Tensor, held: Held, dy: Tensor, fresh: bool) -> None:
    _add_product(target, held[0].conj(), dy.mT, fresh)


_SIDES = {
    "left": (add_left_product, _add_left_product_transposed),
    "right": (add_right_product, _add_right_product_transposed),
}


def _product_rule(name: str, left: str, right: str, *, plus: bool = False) -> None:
    """Register a product of two operands; `plus` a third, before them and unscaled: a bias."""

    def capture(node: Any, operand: int) -> Capture | None:
        if operand not in kept:
            return Capture((), _add_sum)
        return keep(saved(node, kept[operand].name), kept[operand].add)

    # The gradient of the right operand needs the left one, and the reverse.
    sides = {1 + plus: (left, "left"), 0 + plus: (right, "right")}
    kept = {
        operand: Kept(other, *_SIDES[side], "_raw_saved_" + other, "_saved_" + other)
        for operand, (other, side) in sides.items()
    }
    _RULES[name] = Rule(capture, tuple(kept), (0,) if plus else (), kept, _is_unscaled if plus else None)


def _is_unscaled(node: Any) -> bool:
    unscaled: bool = node._saved_alpha == node._saved_beta == 1
    return unscaled


_product_rule("MmBackward0", "self", "mat2")
_product_rule("BmmBackward0", "self", "mat2")
_product_rule("AddmmBackward0", "mat1", "mat2", plus=True)
_product_rule("BaddbmmBackward0", "batch1", "batch2", plus=True)


def _add_sum(target: Tensor, held: Held, dy: Tensor, fresh: bool) -> None:
    """A bias was broadcast: its gradient is dy summed over the dimensions that it lacks."""
    add_or_copy(target, dy.sum_to_size(target.shape), fresh)


@rule("GroupedMmBackward0", weights=(1,))
def _grouped_product(node: Any, operand: int) -> Capture | None:
    """Mixture of experts: rows offs[e-1] to offs[e] of x times the weight of expert e."""
    if len(node._saved_self_sym_sizes) != 2 or len(node._saved_mat2_sym_sizes) != 3:
        return None
    return keep((saved(node, "self"), saved(node, "offs")), _add_grouped_product)


def _add_grouped_product(target: Tensor, held: Held, dy: Tensor, fresh: bool) -> None:
    x, offs = held
    add_or_copy(target, torch._grouped_mm(x.t(), dy, offs=offs), fresh)


# ---- Convolutions, of any dimension, transposed and grouped


@rule("ConvolutionBackward0", weights=(1,), along=(2,))
def _convolution(node: Any, operand: int) -> Capture | None:
    if operand == 2:
        return Capture((), _add_channel_sum)
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    return keep(saved(node, "input"), _AddConvolution([getattr(node, "_saved_" + name) for name in names]))


def _add_channel_sum(target: Tensor, held: Held, dy: Tensor, fresh: bool) -> None:
    add_or_copy(target, dy.sum([0, *range(2, dy.dim())]), fresh)


class _AddConvolution:
    def __init__(self, settings: list[Any]) -> None:
        self.settings = settings

    def __call__(self, target: Tensor, held: Held, dy: Tensor, fresh: bool) -> None:
        # Only the weight's shape and layout are asked of it.
        like = target if target.dtype == dy.dtype else torch.empty_like(target, dtype=dy.dtype)
        wanted = [False, True, False]
        _, gradient, _ = torch.ops.aten.convolution_backward(dy, held[0], like, None, *self.settings, wanted)
        add_or_copy(target, gradient, fresh)


# ---- Embeddings: no temporary the size of the vocabulary


@rule("EmbeddingBackward0", weights=(0,))
def _embedding(node: Any, operand: int) -> Capture | None:
    if node._saved_sparse or node._saved_scale_grad_by_freq:
        return None
    return keep(saved(node, "indices"), _AddRows(node._saved_padding_idx))


class _AddRows:
    """Adds each row of dy to the row of its index; the padding's gets nothing."""

    def __init__(self, padding: int) -> None:
        self.padding = padding  # none: -1, which nodes save as an unsigned number

    def __call__(self, target: Tensor, held: Held, dy: Tensor, fresh: bool) -> None:
        (indices,) = held
        if fresh:
            target.zero_()
        if 0 <= self.padding < target.shape[0]:
            dy = torch.where((indices == self.padding).unsqueeze(-1), 0, dy)
        target.index_add_(0, indices.reshape(-1), dy.reshape(-1, dy.shape[-1]).to(target.dtype))

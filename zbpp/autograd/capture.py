"""What is kept of a node from B until W: tensors that autograd has saved for the node's backward.

Autograd frees a node's saved tensors as soon as the node has run in B. So before B, a rule (rules.py) takes
the tensors that W needs. A `Capture` holds them, and says how W adds the gradient that they give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from zbpp.autograd.offload import SavedTensor, Stays, unpack

HeldTensors = tuple[Any, ...]
"""What is held from B until W: tensors, Packed ones, and SavedTensors, which may be away (offload.py)."""
Add = Callable[[Tensor, HeldTensors, Tensor, bool], None]


class Capture(NamedTuple):
    """What is kept for W of one operand of one node.

    held: tensors to keep until W, detached (or packed: see `Packed`).
    add(target, held, dy, fresh): adds the operand's gradient to `target`, which has the operand's shape. If
    `fresh` is true, target is uninitialised memory: the function overwrites it.
    """

    held: HeldTensors
    add: Add


class Packed(NamedTuple):
    """A saved tensor that saved-tensor hooks have packed; W unpacks it, not B."""

    data: Any
    unpack_hook: Callable[[Any], Tensor]

    def unpack(self) -> Tensor:
        """The tensor."""
        return self.unpack_hook(self.data)

    def tensors(self) -> list[Tensor]:
        """The tensors inside the packed data."""
        return [leaf for leaf in tree_leaves(self.data) if isinstance(leaf, Tensor)]

    @property
    def _version(self) -> int:
        """Like a tensor's `_version`: grows when a tensor inside is changed in place."""
        return version_of(self.tensors())


def version_of(held: Iterable[Any]) -> int:
    """A number that grows whenever one of these tensors is changed in place: the sum of autograd's counts."""
    return sum([each._version for each in held])


def saved(node: Node, name: str) -> Tensor | Packed | SavedTensor | None:
    """The tensor that a node has saved under `name`, detached from the graph that computed it.

    A tensor that save_on_cpu or `SavedActivations` packed is returned packed, and W unpacks it. Returns None
    for tensors that other hooks packed, because unpacking a checkpoint's tensor in the walk would recompute
    too early. Returns None for sparse tensors: B computes the gradients of their products.
    """
    raw = getattr(node, "_raw_saved_" + name)
    hook = raw.unpack_hook
    if hook is unpack and type(raw.data) is SavedTensor:
        raw.data.check()
        return raw.data
    if is_kept(raw):
        tensor: Tensor = getattr(node, "_saved_" + name)
        if tensor.layout is not torch.strided:
            return None
        return tensor.detach() if tensor.requires_grad else tensor
    if getattr(hook, "__qualname__", "").startswith("save_on_cpu."):
        return Packed(raw.data, hook)
    return None


def is_kept(raw: Any) -> bool:
    """Whether a node's raw saved tensor is the tensor itself: no hook packed it, or it stays."""
    hook = raw.unpack_hook
    return hook is None or (hook is unpack and type(raw.data) is Stays)


def tensors_in(held: HeldTensors) -> Iterator[Tensor]:
    """The tensors that are kept alive, those inside packed ones included."""
    for each in held:
        yield from (each,) if isinstance(each, Tensor) else each.tensors()


def saved_by(node: Any) -> Iterator[Tensor]:
    """All tensors that a node has saved; packed ones are not unpacked."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            raw = getattr(node, name)
            for each in raw if isinstance(raw, tuple) else (raw,):
                if each.unpack_hook is unpack:
                    yield from each.data.tensors()
                else:
                    yield from Packed(each.data, each.unpack_hook).tensors()


_Kept = Tensor | Packed | SavedTensor | None


def keep(tensors: _Kept | tuple[_Kept, ...], add: Add) -> Capture | None:
    """A Capture of one saved tensor, or of several; None if one of them is None."""
    held = tensors if type(tensors) is tuple else (tensors,)
    if any(each is None for each in held):
        return None
    return Capture(held, add if all(isinstance(each, Tensor) for each in held) else UnpackingAdd(add))


class UnpackingAdd:
    """Unpacks the held tensors in W, then calls `add`."""

    def __init__(self, add: Add) -> None:
        self.add = add

    def __call__(self, target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
        unpacked = [each if isinstance(each, Tensor) else each.unpack() for each in held]
        self.add(target, tuple(unpacked), dy, fresh)


def add_or_copy(target: Tensor, gradient: Tensor, fresh: bool) -> None:
    """Add to the target, for rules that have to compute the gradient in a tensor of its own."""
    if fresh:
        target.copy_(gradient)
    else:
        target.add_(gradient)

"""What is kept of a node from B until W: tensors that autograd has saved for the node's backward.

Autograd frees a node's saved tensors as soon as the node has run in B. So before B, a rule (rules.py) takes
the tensors that W needs. A `Capture` holds them, and says how W adds the gradient that they give.

Saved-tensor hooks may have packed a tensor. The walk unpacks none: a tensor may be away, and unpacking a
checkpoint's tensor would recompute too early. An unpack hook that is `unpack` marks a `PackedTensor`: W holds
it as it is, and unpacks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

HeldTensors = tuple[Any, ...]
"""What is held from B until W: tensors, packed tensors, and what stands for a tensor of a subclass."""
Add = Callable[[Tensor, HeldTensors, Tensor, bool], None]


class Capture(NamedTuple):
    """What is kept for W of one operand of one node.

    held: tensors to keep until W, detached (or packed: see `Packed`).
    add(target, held, dy, fresh): adds the operand's gradient to `target`, which has the operand's shape. If
    `fresh` is true, target is uninitialised memory: the function overwrites it.
    """

    held: HeldTensors
    add: Add


class PackedTensor(Protocol):
    """What a pack hook returns beside the unpack hook `unpack`.

    stays: whether the packed tensor is at hand. Then B takes the tensor itself, as if it were not packed.
    """

    @property
    def stays(self) -> bool: ...

    @property
    def _version(self) -> int:
        """Like a tensor's `_version`: grows when the saved tensor is changed in place."""

    def check(self) -> None:
        """Raise RuntimeError if the tensor was changed in place since it was saved."""

    def unpack(self) -> Tensor:
        """The tensor."""

    def tensors(self) -> Iterable[Tensor]:
        """The tensors that are kept alive now."""


def unpack(packed: PackedTensor) -> Tensor:
    """The unpack hook that marks what it unpacks as a PackedTensor."""
    return packed.unpack()


class Packed(NamedTuple):
    """A saved tensor that save_on_cpu has packed; W unpacks it, not B."""

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


def saved(node: Node, name: str) -> Tensor | Packed | PackedTensor | None:
    """The tensor that a node has saved under `name`, detached from the graph that computed it.

    A PackedTensor, or a tensor that save_on_cpu packed, is returned packed, and W unpacks it. Returns None
    for tensors that other hooks packed, and for sparse tensors: B computes the gradients of their products.
    """
    raw = getattr(node, "_raw_saved_" + name)
    hook = raw.unpack_hook
    if hook is unpack and not raw.data.stays:
        packed: PackedTensor = raw.data
        packed.check()
        return packed
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
    return hook is None or (hook is unpack and raw.data.stays)


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


_Kept = Tensor | Packed | PackedTensor | None


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


class AddOfParts(ABC):
    """An Add that computes with parts of tensors of a subclass, such as the shards of DTensors."""

    @abstractmethod
    def __call__(self, target: Tensor, held: HeldTensors, dy: Any, fresh: bool) -> None: ...

    @abstractmethod
    def placed(self, dy: Tensor) -> Any:
        """What W holds and passes in place of dy, with `tensors()` and `_version`; called at the end of B."""

"""Finds the weights that autograd has saved in the graph of a block's outputs, and packs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.runtime.memory.weight_buffers import View


class _Packed(NamedTuple):
    """A packed saved tensor: its view, and whether its conjugate bit and its negative bit are set."""

    view: View
    is_conj: bool
    is_neg: bool


def pack_views(
    outputs: Iterable[Any], below: Iterable[Any], memory: Tensor, unpack: Callable[[View], Tensor]
) -> None:
    """Pack every saved tensor that is a view of this memory; `unpack` makes a tensor of its View later.

    The search goes through the graph from the outputs down to the nodes `below`, which it does not enter. A
    tensor that other saved-tensor hooks have packed stays as it is.
    """
    start = memory.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> _Packed:
        view = View(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        return _Packed(view, tensor.is_conj(), tensor.is_neg())

    def unpack_whole(packed: _Packed) -> Tensor:
        tensor = unpack(packed.view)
        tensor = tensor.conj() if packed.is_conj else tensor
        return torch._neg_view(tensor) if packed.is_neg else tensor

    seen: set[Any] = {None, *below}
    nodes = [node for node in dict.fromkeys(nodes_of(outputs)) if node not in seen]
    seen.update(nodes)
    for node in nodes:  # the list grows during the loop
        kind: Any = type(node)
        for raw_name, name in _saved_names(kind):
            raws, values = getattr(node, raw_name), None
            for number, raw in enumerate(raws if isinstance(raws, tuple) else (raws,)):
                if raw is None or raw.unpack_hook is not None:
                    continue
                values = getattr(node, name) if values is None else values
                value = values[number] if isinstance(raws, tuple) else values
                if isinstance(value, Tensor) and _starts_at(value, start):
                    del value
                    values = None
                    raw.register_hooks(pack, unpack_whole)
        for below, _ in node.next_functions:
            if below not in seen:
                seen.add(below)
                nodes.append(below)


def _starts_at(tensor: Tensor, start: int) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() == start
    except (RuntimeError, NotImplementedError):  # a tensor without a storage
        return False


def nodes_of(tensors: Iterable[Any]) -> list[Any]:
    """The graph nodes that computed these tensors; values that are no tensors are passed over."""
    return [tensor.grad_fn for tensor in tensors if isinstance(tensor, Tensor) and tensor.grad_fn is not None]


@cache
def _saved_names(cls: Any) -> list[tuple[str, str]]:
    """For a type of node: (attribute with its raw saved tensors, attribute with their values)."""
    raws = [name for name in dir(cls) if name.startswith("_raw_saved_")]
    return [
        (
            name,
            "saved_tensors"
            if name == "_raw_saved_tensors" and hasattr(cls, "saved_tensors")
            else name.removeprefix("_raw"),
        )
        for name in raws
    ]

"""The Python attributes of modules: forward reads and changes them, a replay does neither.

A mark says what a value is, so that a later change is seen: numbers and texts by value, tensors by address
and layout, containers by the marks of their items, any other object by its identity alone. So a change inside
an object, or in a container of more than _MOST items, is not seen.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.graphs.maker import NotCapturable

_OWN = frozenset(vars(nn.Module()))  # what torch itself keeps in each module
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_MAPPINGS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_MAPPINGS, list, tuple, set, deque)
_DEPTH, _MOST = 3, 256


def marks(modules: Iterable[nn.Module]) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """For each module the marks of its attributes, by name."""
    return tuple(
        tuple([(name, _mark(value)) for name, value in module.__dict__.items() if name not in _OWN])
        for root in modules
        for module in root.modules()
    )


def address(tensor: Tensor) -> Any:
    """Where a tensor is, and how it lies there."""
    if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return id(tensor)
    return id(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _mark(value: Any, depth: int = 0) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value  # 1, 1.0 and True are equal, but not the same
    if isinstance(value, Tensor):
        return address(value)
    if kind not in _CONTAINERS or depth == _DEPTH or len(value) > _MOST:
        return id(value)
    return kind, *[(key, _mark(each, depth + 1)) for key, each in _items(value)]


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    """(key or number, value) of each item; the elements of a set have their identity as the key."""
    if type(container) in _MAPPINGS:
        return ((key if type(key) in _PLAIN else id(key), each) for key, each in container.items())
    if type(container) is set:
        return ((id(each), each) for each in container)
    return enumerate(container)


class AttributesBefore:
    """The attributes and buffers of modules as they are before a capture.

    A capture computes nothing. So a tensor that forward has made in it, and keeps, was never computed.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        named = [(path, each, root) for root in modules for path, each in root.named_modules()]
        self._modules = [each for _, each, _ in named]
        self._names = [f"{path}{'.' if path else ''}{{}} of {type(root).__name__}" for path, _, root in named]
        self._tables = [_attributes(each) for each in self._modules]
        self._buffers = [dict(each._buffers) for each in self._modules]
        self._tensors = [dict(_tensors_of(each)) for each in self._modules]
        self._containers: list[tuple[Any, Any]] = []
        for table in self._tables:
            for value in table.values():
                self._keep(value)

    def _keep(self, value: Any, depth: int = 0) -> None:
        if type(value) in _CONTAINERS and depth < _DEPTH and len(value) <= _MOST:
            if type(value) is not tuple:
                self._containers.append((value, value.copy()))
            for _, each in _items(value):
                self._keep(each, depth + 1)

    def check(self) -> None:
        """Raise NotCapturable if a tensor has come, or has taken another one's place."""
        for text, module, before in zip(self._names, self._modules, self._tensors, strict=True):
            for name, tensor in _tensors_of(module):
                if before.get(name) is not tensor:
                    raise NotCapturable(
                        f"forward replaces {text.format(name)}, which a replay would not do: change it in "
                        "place (copy_)"
                    )

    def check_device(self, device: torch.device) -> None:
        """Raise NotCapturable for a tensor on another kind of device: a graph does not see it change."""
        for text, tensors in zip(self._names, self._tensors, strict=True):
            for name, tensor in tensors.items():
                if tensor.device.type != device.type:
                    raise NotCapturable(
                        f"{text.format(name)} is on {tensor.device}, the stages are on {device}: move it "
                        "there, or write a number"
                    )

    def restore(self) -> None:
        """Give the modules their attributes and buffers again, as if forward had not run."""
        for container, items in self._containers:
            container.clear()
            (container.update if isinstance(container, dict | set) else container.extend)(items)
        for module, table, buffers in zip(self._modules, self._tables, self._buffers, strict=True):
            for name in _attributes(module).keys() - table.keys():
                del module.__dict__[name]
            module.__dict__.update(table)
            module._buffers.clear()
            module._buffers.update(buffers)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _OWN}


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a module holds beside its parameters, by name."""
    for table in (module._buffers, _attributes(module)):
        for name, value in table.items():
            yield from _tensors_in(name, value)


def _tensors_in(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif type(value) in _CONTAINERS and depth < _DEPTH and len(value) <= _MOST:
        for key, each in _items(value):
            yield from _tensors_in(f"{name}[{key!r}]", each, depth + 1)

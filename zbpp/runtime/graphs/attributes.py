"""The Python values that forward and the loss read: forward also changes them, a replay does neither.

A mark says what a value is, so that a later change is seen: numbers and texts by value, tensors by address
and layout, containers by the marks of their items, functions by what they are bound to and close over, any
other object by its identity alone. So a change inside an object, or in a container of more than _MOST items,
is not seen. Of a loss that is an object, or a method of one, the object's attributes are marked.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from zbpp.runtime.graphs.maker import NotCapturable

_OWN = frozenset(vars(nn.Module()))  # what torch itself keeps in each module
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_MAPPINGS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_MAPPINGS, list, tuple, set, deque)
_FUNCTIONS = (FunctionType, MethodType, partial)
_DEPTH, _MOST = 3, 256
_SMALL = 4096  # bytes of an array that is compared

Marks = tuple[tuple[tuple[str, Any], ...], ...]


def marks(modules: Iterable[nn.Module], loss: Any = None) -> Marks:
    """For each module the marks of its attributes, by name; then those of a loss that is no module."""
    every = [module for root in modules for module in root.modules()]
    known = set(map(id, every))
    found = [_marks_of(module, known) for module in every]
    if loss is not None and not isinstance(loss, nn.Module):
        found.append((("the function", _mark(loss, known)), *_marks_of(loss, known)))
    return tuple(found)


def _marks_of(owner: Any, known: set[int]) -> tuple[tuple[str, Any], ...]:
    table = getattr(owner, "__dict__", {})
    return tuple([(name, _mark(value, known)) for name, value in table.items() if name not in _OWN])


def address(tensor: Tensor) -> Any:
    """Where a tensor is, and how it lies there."""
    if tensor.layout is not torch.strided or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return id(tensor)
    return id(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _mark(value: Any, known: set[int], depth: int = 0) -> Any:
    """known: ids of the modules that have marks of their own; grows by those that are found in containers."""
    kind = type(value)
    if kind is float:
        return kind, value, math.copysign(1.0, value)
    if kind in _PLAIN:
        return kind, value  # 1, 1.0 and True are equal, but not the same
    if isinstance(value, Tensor):
        return address(value)
    if kind in (numpy.ndarray, bytearray) and memoryview(value).nbytes <= _SMALL:
        return id(value), bytes(value)
    if depth == _DEPTH:
        return id(value)
    if kind in _FUNCTIONS:
        return _of_function(value, known, depth + 1)
    if isinstance(value, nn.Module):
        return _of_other_module(value, known) if depth else id(value)
    if kind not in _CONTAINERS or len(value) > _MOST:
        return id(value)
    return kind, *[(key, _mark(each, known, depth + 1)) for key, each in _items(value)]


def _of_function(function: Any, known: set[int], depth: int) -> Any:
    """What a function is bound to, closes over, and reads of numbers and texts in its file."""
    if isinstance(function, MethodType):
        owner = function.__self__
        table = {} if id(owner) in known else {**getattr(owner, "__dict__", {})}
        kept = [(name, _mark(each, known, depth)) for name, each in table.items() if name not in _OWN]
        return id(function.__func__), id(owner), *kept
    if isinstance(function, partial):
        given = function.func, function.args, function.keywords
        return id(function), *[_mark(each, known, depth) for each in given]
    code, names = function.__code__, function.__globals__
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    read = [names.get(name) for name in code.co_names if type(names.get(name)) in _PLAIN]
    parts = cells, read, function.__defaults__, function.__kwdefaults__
    return id(function), id(code), *[_mark(each, known, depth) for each in parts]


def _of_other_module(root: nn.Module, known: set[int]) -> Any:
    """The marks of a module that is in a list or a dict, where torch does not find it."""
    found: list[Any] = []
    for module in root.modules():
        if id(module) not in known:
            known.add(id(module))
            tensors = *module._parameters.values(), *module._buffers.values()
            places = [None if each is None else address(each) for each in tensors]
            found.append((module.training, places, _marks_of(module, known)))
    return id(root), *found


def _number(value: Any, depth: int = 0) -> Any:
    """The numbers and texts in a value, and the kinds of all else."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind not in _CONTAINERS or depth == _DEPTH or len(value) > _MOST:
        return kind
    return kind, *[(key, _number(each, depth + 1)) for key, each in _items(value)]


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    """(key or number, value) of each item; the elements of a set have their identity as the key."""
    if type(container) in _MAPPINGS:
        return ((key if type(key) in _PLAIN else id(key), each) for key, each in container.items())
    if type(container) is set:
        return ((id(each), each) for each in container)
    return enumerate(container)


class AttributesBefore:
    """The attributes and buffers of modules as they are before a capture, and what the loss refers to.

    A capture computes nothing. So a tensor that forward has made in it, and keeps, was never computed. And a
    number that forward changes (a counter) would not change in a replay.
    """

    def __init__(self, modules: Iterable[nn.Module], loss: Any = None) -> None:
        self._loss, self._of_loss = loss, marks((), loss)
        named = [(path, each, root) for root in modules for path, each in root.named_modules()]
        self._modules = [each for _, each, _ in named]
        self._names = [f"{path}{'.' if path else ''}{{}} of {type(root).__name__}" for path, _, root in named]
        self._tables = [_attributes(each) for each in self._modules]
        self._buffers = [dict(each._buffers) for each in self._modules]
        self._tensors = [dict(_tensors_of(each)) for each in self._modules]
        self._numbers = [_numbers_of(each) for each in self._modules]
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
        """Raise NotCapturable if a tensor has come, or taken another one's place, or a number has changed."""
        rows = zip(self._names, self._modules, self._tensors, self._numbers, strict=True)
        for text, module, tensors, numbers in rows:
            for name, tensor in _tensors_of(module):
                if tensors.get(name) is not tensor:
                    raise NotCapturable(
                        f"forward replaces {text.format(name)}, which a replay would not do: change it in "
                        "place (copy_)"
                    )
            now = _numbers_of(module)
            for name in [name for name in {**numbers, **now} if numbers.get(name) != now.get(name)]:
                raise NotCapturable(
                    f"forward changes {text.format(name)}, which a replay would not do: keep it in a buffer, "
                    "and change that in place"
                )
        if marks((), self._loss) != self._of_loss:
            raise NotCapturable(
                "the loss function changes a value that it refers to: a replay would not do so"
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


def _numbers_of(module: nn.Module) -> dict[str, Any]:
    return {name: _number(value) for name, value in _attributes(module).items()}


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

"""The parameters, buffers and numbers that a forward used, so that its recompute can run on the same values.

A recompute runs later than the forward that it repeats. In between, parameters, buffers and attributes of
modules may change.

- A parameter or a large buffer must not change: the recompute raises an error if it was replaced, unfrozen or
  changed in place.
- A small buffer, such as running statistics, is copied in the forward. The recompute runs on copies of that
  copy: it reads the values that the forward read, and its own changes are dropped, since the forward has made
  them already. A buffer that the forward makes, or puts where None was, is not there yet in the recompute.
- A plain attribute of a module (a number, a string, None) has the value that it had in the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

SMALL = 64 * 1024
"""A buffer of at most so many bytes is copied."""


def references(thing: Any) -> Iterator[nn.Module | Tensor]:
    """The modules and tensors that a callable refers to.

    Searched are the object of a method, closures, defaults, bound arguments, globals that are modules or
    tensors, and the attributes of an object that is no module. Functions that the callable calls are searched
    only if they are in its closure or arguments.
    """
    pending: list[Any] = [thing]
    seen: set[int] = set()
    for each in pending:  # the list grows during the loop
        if id(each) in seen:
            continue
        seen.add(id(each))
        match each:
            case Tensor() | nn.Module():
                yield each
            case MethodType():
                pending += [each.__func__, *_attributes(each.__self__)]
            case partial():
                pending += [each.func, *each.args, *each.keywords.values()]
            case FunctionType():
                pending += [cell.cell_contents for cell in each.__closure__ or () if cell != CellType()]
                pending += [*(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()]
                used_globals = [each.__globals__.get(name) for name in each.__code__.co_names]
                pending += _modules_and_tensors(used_globals)
            case list() | tuple():
                pending += each
            case dict():
                pending += each.values()
            case type():
                pass
            case _ if callable(each):
                pending += _attributes(each)


def _attributes(owner: Any) -> list[Any]:
    """A module itself; for any other object, its attributes that are modules or tensors."""
    if isinstance(owner, nn.Module):
        return [owner]
    return _modules_and_tensors(getattr(owner, "__dict__", {}).values())


def _modules_and_tensors(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, (Tensor, nn.Module))]


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_Table = dict[str, Any]


class _Watched(NamedTuple):
    """A tensor that must not change between the forward and the recompute."""

    table: _Table | None  # the module's dictionary with the tensor; None if it is in no module
    name: str
    tensor: Tensor
    version: int
    was_trainable: bool

    def change(self) -> str | None:
        """How the tensor has changed; None if it has not."""
        if self.table is not None and self.table.get(self.name) is not self.tensor:
            return "was replaced"
        if version(self.tensor) != self.version:
            return "was changed in place"
        return "was unfrozen" if self.tensor.requires_grad > self.was_trainable else None


class ForwardState:
    """The parameters and buffers that a callable refers to, as they are when this object is made."""

    def __init__(self, things: Any) -> None:
        self._watched: list[_Watched] = []
        self._copies: dict[int, Tensor] = {}  # of small buffers; several modules may share one
        self._buffers: list[tuple[_Table, _Table]] = []  # a module's dictionary, its recompute's entries
        self._attributes: list[tuple[_Table, _Table]] = []  # a module's dictionary, its plain entries
        self._modules: dict[int, nn.Module] = {}
        for thing in references(things):
            if isinstance(thing, Tensor):
                self._watch(None, "a tensor", thing)
                continue
            for module in thing.modules():
                if id(module) not in self._modules:
                    self._modules[id(module)] = module
                    self._add(module)

    def _add(self, module: nn.Module) -> None:
        for name, tensor in module._parameters.items():
            if tensor is not None:
                self._watch(module._parameters, name, tensor)
        entries = dict(module._buffers)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.nbytes > SMALL or buffer.requires_grad:
                self._watch(module._buffers, name, buffer)
                continue
            if id(buffer) not in self._copies:
                self._copies[id(buffer)] = buffer.clone()
            entries[name] = self._copies[id(buffer)]
        self._buffers.append((module._buffers, entries))
        attributes = vars(module)
        plain = {name: value for name, value in attributes.items() if type(value) in _PLAIN}
        self._attributes.append((attributes, plain))

    def _watch(self, table: _Table | None, name: str, tensor: Tensor) -> None:
        self._watched.append(_Watched(table, name, tensor, version(tensor), tensor.requires_grad))

    def hooked(self) -> list[Tensor]:
        """The trainable leaves that have post-accumulate-grad hooks."""
        leaves = {id(each.tensor): each.tensor for each in self._watched if each.was_trainable}
        return [leaf for leaf in leaves.values() if leaf.is_leaf and leaf._post_accumulate_grad_hooks]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, small buffers (as copies) and plain attributes have the values that the forward found.

        Raises RuntimeError if a parameter or a large buffer has changed.
        """
        for watched in self._watched:
            if change := watched.change():
                raise self._changed(watched, change)
        now = [(table, dict(table)) for table, _ in self._buffers]
        # An attribute that is no longer in the dictionary may be a parameter by now.
        present = [
            (table, {name: table[name] for name in plain if name in table}, plain)
            for table, plain in self._attributes
        ]
        copied = {id(copy): copy.clone() for copy in self._copies.values()}  # there may be another recompute
        try:
            for table, entries in self._buffers:
                _fill(table, {name: copied.get(id(value), value) for name, value in entries.items()})
            for table, values, plain in present:
                table.update({name: plain[name] for name in values})
            yield
        finally:
            for table, values, _ in present:
                table.update(values)
            for table, entries in now:
                _fill(table, entries)

    def _changed(self, watched: _Watched, change: str) -> RuntimeError:
        owners = [
            module
            for module in self._modules.values()
            if watched.table is module._parameters or watched.table is module._buffers
        ]
        name = ".".join([*(type(owner).__name__ for owner in owners), watched.name])
        return RuntimeError(
            f"{name} of shape {tuple(watched.tensor.shape)} {change} between a checkpoint's forward and its "
            "recompute, which would compute with other values: change parameters and large buffers only "
            "after all backwards; a forward that does so itself can't be checkpointed"
        )


def _fill(table: _Table, entries: _Table) -> None:
    table.clear()
    table.update(entries)


def version(tensor: Tensor) -> int:
    """Autograd's count of a tensor's in-place changes; 0 for an inference tensor, which has no count."""
    return 0 if tensor.is_inference() else tensor._version

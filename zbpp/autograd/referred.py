"""The modules and tensors that a callable refers to, and what its forward found in them.

A recompute runs later than the forward that it repeats. A plain forward would have saved what it
used, and autograd would watch that. So the recompute must find what the forward found:

- Parameters and large buffers may not have changed in between; autograd counts in-place changes.
- Of small buffers, running statistics above all, the forward keeps a copy. The recompute runs on copies
  of these: it sees what the forward saw, and what it writes is dropped, since the forward has written it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

SMALL = 64 * 1024
"""Bytes of the largest buffer that is copied."""


def referred(thing: Any) -> Iterator[nn.Module | Tensor]:
    """What a callable refers to: as a method, by its closure, defaults or bound arguments, as a global.

    Of an object that is no module, its own attributes count; of a function that it calls, nothing does
    unless that is in its closure or arguments.
    """
    pending: list[Any] = [thing]
    seen: set[int] = set()
    for each in pending:  # which grows meanwhile
        if id(each) in seen:
            continue
        seen.add(id(each))
        match each:
            case Tensor() | nn.Module():
                yield each
            case MethodType():
                pending += [each.__func__, *_owned(each.__self__)]
            case partial():
                pending += [each.func, *each.args, *each.keywords.values()]
            case FunctionType():
                pending += [cell.cell_contents for cell in each.__closure__ or () if cell != CellType()]
                pending += [*(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()]
                pending += _known([each.__globals__.get(name) for name in each.__code__.co_names])
            case list() | tuple():
                pending += each
            case dict():
                pending += each.values()
            case type():
                pass
            case _ if callable(each):
                pending += _owned(each)


def _owned(owner: Any) -> list[Any]:
    return [owner] if isinstance(owner, nn.Module) else _known(getattr(owner, "__dict__", {}).values())


def _known(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, (Tensor, nn.Module))]


_Place = tuple[dict[str, Any], str]  # a module's buffers, and a name among them


class _Kept(NamedTuple):
    """A tensor that must be in the recompute what it was in the forward."""

    table: dict[str, Any] | None  # of a module, that has it; None if the callable refers to it directly
    name: str
    tensor: Tensor
    version: int
    was_trainable: bool

    def change(self) -> str | None:
        """What was done to it."""
        if self.table is not None and self.table.get(self.name) is not self.tensor:
            return "was replaced"
        if version(self.tensor) != self.version:
            return "was changed in place"
        return "was frozen, and is no more," if self.tensor.requires_grad > self.was_trainable else None


class Found:
    """The parameters and buffers that things refer to, as they are now."""

    def __init__(self, things: Any) -> None:
        self._kept: list[_Kept] = []
        self._copies: dict[int, tuple[list[_Place], Tensor]] = {}
        self._modules: dict[int, nn.Module] = {}
        for thing in referred(things):
            if isinstance(thing, Tensor):
                self._keep(None, "a tensor", thing)
                continue
            for module in thing.modules():
                if id(module) not in self._modules:
                    self._modules[id(module)] = module
                    self._add(module)

    def _add(self, module: nn.Module) -> None:
        for name, tensor in module._parameters.items():
            if tensor is not None:
                self._keep(module._parameters, name, tensor)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.nbytes > SMALL or buffer.requires_grad:
                self._keep(module._buffers, name, buffer)
                continue
            if id(buffer) not in self._copies:  # one that several modules share
                self._copies[id(buffer)] = [], buffer.clone()
            self._copies[id(buffer)][0].append((module._buffers, name))

    def _keep(self, table: dict[str, Any] | None, name: str, tensor: Tensor) -> None:
        self._kept.append(_Kept(table, name, tensor, version(tensor), tensor.requires_grad))

    def hooked(self) -> list[Tensor]:
        """The trained leaves that have post-accumulate-grad hooks."""
        leaves = {id(each.tensor): each.tensor for each in self._kept if each.was_trainable}
        return [leaf for leaf in leaves.values() if leaf.is_leaf and leaf._post_accumulate_grad_hooks]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run on copies of the small buffers. Raises RuntimeError if anything else is not what it was."""
        for kept in self._kept:
            if change := kept.change():
                raise self._changed(kept, change)
        now = [(table, name, table[name]) for places, _ in self._copies.values() for table, name in places]
        try:
            for places, copy in self._copies.values():
                copied = copy.clone()  # the graph may be gone through again
                for table, name in places:
                    table[name] = copied
            yield
        finally:
            for table, name, tensor in now:
                table[name] = tensor

    def _changed(self, kept: _Kept, change: str) -> RuntimeError:
        owners = [
            m for m in self._modules.values() if kept.table is m._parameters or kept.table is m._buffers
        ]
        name = ".".join([*(type(owner).__name__ for owner in owners), kept.name])
        return RuntimeError(
            f"{name} of shape {tuple(kept.tensor.shape)} {change} between a checkpoint's forward and its "
            "recompute, which would compute with other values: change parameters and large buffers only "
            "after all backwards; a forward that does so itself can't be checkpointed"
        )


def version(tensor: Tensor) -> int:
    """Autograd does not count the changes of tensors made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version

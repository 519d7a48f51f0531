"""The modules and tensors that a Python callable refers to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn


def references(thing: Any, *, with_globals: bool = False) -> Iterator[nn.Module | Tensor]:
    """The modules and tensors that a callable refers to.

    Searched are the callable itself, the object of a method, closures, bound arguments, and lists, tuples and
    dicts of these; with_globals: also the modules and tensors among a function's global variables.
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
                pending += [each.__func__, each.__self__]
            case partial():
                pending += [each.func, *each.args, *each.keywords.values()]
            case FunctionType():
                pending += [cell.cell_contents for cell in each.__closure__ or () if cell != CellType()]
                if with_globals:
                    used = (each.__globals__.get(name) for name in each.__code__.co_names)
                    pending += [value for value in used if isinstance(value, nn.Module | Tensor)]
            case list() | tuple():
                pending += each
            case dict():
                pending += each.values()

"""Tensors inside nested values: torch's pytrees (lists, tuples, dicts, namedtuples, ...) and dataclasses.

torch.utils._pytree takes a dataclass for a leaf unless somebody has registered it. Here every dataclass that
holds a tensor is opened. One without tensors, such as a config, stays the object that it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


class Structure(NamedTuple):
    """A value without its leaves.

    opened: the position of a dataclass among the leaves of `spec` -> the object without its fields, the names
    of the fields, the structure of the list of their values.
    """

    spec: TreeSpec
    opened: dict[int, tuple[Any, list[str], Structure]]
    size: int  # number of leaves

    def filled(self, leaves: list[Any]) -> Any:
        """The value with these leaves; containers and dataclasses are new objects."""
        if self is _TENSOR:
            return leaves[0]
        return self._filled(iter(leaves))

    def _filled(self, leaves: Iterator[Any]) -> Any:
        if not self.opened:
            return tree_unflatten(islice(leaves, self.spec.num_leaves), self.spec)
        values = [
            _with_fields(*self.opened[position], leaves) if position in self.opened else next(leaves)
            for position in range(self.spec.num_leaves)
        ]
        return tree_unflatten(values, self.spec)


_TENSOR = Structure(tree_flatten(None)[1], {}, 1)


def _with_fields(blank: Any, names: list[str], structure: Structure, leaves: Iterator[Any]) -> Any:
    made = copy(blank)
    for name, value in zip(names, structure._filled(leaves), strict=True):
        object.__setattr__(made, name, value)  # a dataclass may be frozen
    return made


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a value, in the order of its structure; and the structure, which refers to no tensor."""
    if isinstance(value, Tensor):
        return [value], _TENSOR
    found, spec = tree_flatten(value)
    leaves: list[Any] = []
    opened = {}
    for position, leaf in enumerate(found):
        names = _names(leaf)
        if names:
            inside, structure = flatten([getattr(leaf, name) for name in names])
            if any(isinstance(each, Tensor) for each in inside):
                opened[position] = _blank(leaf, names), names, structure
                leaves += inside
                continue
        leaves.append(leaf)
    return leaves, Structure(spec, opened, len(leaves))


def _names(leaf: Any) -> list[str]:
    """The fields of a dataclass that have a value; of another object, none."""
    if isinstance(leaf, Tensor | type | nn.Module) or not is_dataclass(leaf):
        return []
    return [each.name for each in fields(leaf) if hasattr(leaf, each.name)]


def _blank(leaf: Any, names: list[str]) -> Any:
    blank = copy(leaf)
    for name in names:
        object.__setattr__(blank, name, None)
    return blank


def hidden_tensors(leaf: Any) -> list[Tensor]:
    """The tensors in the attributes or elements of a leaf, which `flatten` does not find."""
    if isinstance(leaf, Tensor | type | nn.Module):
        return []
    inside = [vars(leaf)] if hasattr(leaf, "__dict__") else []
    if isinstance(leaf, Mapping):
        inside += leaf.values()
    elif isinstance(leaf, list | tuple | set | frozenset):
        inside += leaf
    return [each for each in tree_leaves(inside) if isinstance(each, Tensor)]

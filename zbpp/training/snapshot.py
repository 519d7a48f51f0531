"""Remembers an optimizer's states and options, and copies of its tensors, so that they can be restored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime.mesh import local_of

_CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)


def snapshot(value: Any, tensors: list[Tensor]) -> Callable[[], Any]:
    """A function that restores a nest of dicts, lists and tuples to its present content.

    The function returns the nest. It does not restore the values of tensors: `snapshot` adds the tensors to
    `tensors`, and the caller copies them. Raises ValueError for an object of another type, whose changes
    can't be restored.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return lambda: value
    if isinstance(value, dict):
        items = {key: snapshot(each, tensors) for key, each in value.items()}
        return lambda: _refilled(value, {key: restore() for key, restore in items.items()})
    if isinstance(value, list):
        entries = [snapshot(each, tensors) for each in value]
        return lambda: _refilled(value, [restore() for restore in entries])
    if type(value) is tuple:
        parts = [snapshot(each, tensors) for each in value]
        return lambda: tuple(restore() for restore in parts)
    if isinstance(value, _CONSTANTS) or inspect.isroutine(value):
        return lambda: value
    raise ValueError(
        f"the optimizer keeps an object of type {type(value).__name__} in its state, and post-validation can "
        "copy only tensors, numbers, and dicts, lists and tuples of them: write optimizer.validation=before, "
        "or keep tensors"
    )


class Copies:
    """Copies of tensors: `take` copies all of them, `give_back` restores all of them.

    Of a DTensor, the part that this process holds is copied.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # id of a tensor -> the tensor and its copy

    @torch.no_grad()
    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors, and drop the copies taken before."""
        self._copies = {}
        for tensor in tensors:
            self._copies[id(tensor)] = tensor, torch.empty_like(local_of(tensor.detach()))
        for originals, copies in self._lists():
            torch._foreach_copy_(copies, originals)

    @torch.no_grad()
    def give_back(self) -> None:
        """Give the tensors the values that they had at the last `take`."""
        for originals, copies in self._lists():
            torch._foreach_copy_(originals, copies)

    @property
    def num_bytes(self) -> int:
        """The memory of the copies."""
        return sum(copy.nbytes for _, copy in self._copies.values())

    def tensors(self) -> list[Tensor]:
        """The copies."""
        return [copy for _, copy in self._copies.values()]

    def _lists(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """(tensors, copies) for each device and dtype: _foreach_copy_ is fast if these agree in a list."""
        lists: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for tensor, copy in self._copies.values():
            originals, copies = lists.setdefault((copy.device, copy.dtype), ([], []))
            originals.append(local_of(tensor.detach()))
            copies.append(copy)
        yield from lists.values()


class Options:
    """The options of an optimizer's groups before and after a step. Some optimizers count steps in them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._restore: list[Callable[[], Any]] = []
        self._after: list[dict[str, Any]] = []
        self._parameters: list[list[int]] = []  # for each group, the ids of its parameters

    def keep(self, tensors: list[Tensor]) -> None:
        """Remember the options. Adds the tensors among them to `tensors`, which the caller copies."""
        groups = self._optimizer.param_groups
        self._restore = [snapshot(options_of(group), tensors) for group in groups]
        self._parameters = [list(map(id, group["params"])) for group in groups]

    def after_step(self) -> None:
        """Remember the options as they are after the step."""
        self._after = [copied(group) for group in self._optimizer.param_groups]

    @contextmanager
    def before_step(self) -> Iterator[None]:
        """Within this context the options are those of `keep`.

        Afterwards the options that were changed since `after_step` (a learning rate) have their new values.
        """
        groups, added = self._optimizer.param_groups, self._take_out_added()
        later = [_changes(group, after) for group, after in zip(groups, self._after, strict=True)]
        for group, restore in zip(groups, self._restore, strict=True):
            restored = restore()
            for name in set(options_of(group)) - set(restored):
                del group[name]
            group.update(restored)
        try:
            yield
        finally:
            groups.extend(added)
            for group, changes in zip(groups, later, strict=False):  # without the added groups
                for name, value in changes.items():
                    if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = value

    def _take_out_added(self) -> list[dict[str, Any]]:
        """Remove from the optimizer the groups that add_param_group has added since the step; return them."""
        groups, kept = self._optimizer.param_groups, self._parameters
        if any(list(map(id, group["params"])) != ids for group, ids in zip(groups, kept, strict=False)) or (
            len(groups) < len(kept)
        ):
            raise RuntimeError(
                "the optimizer's groups got other parameters between an update and the gate of the next "
                "step: call settle() of PostValidation before you change them, or use add_param_group"
            )
        added = groups[len(kept) :]
        del groups[len(kept) :]
        return added


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group; tensors among them are copied."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in options_of(group).items()
    }


def _changes(group: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that differ from `after`."""
    return {name: value for name, value in copied(group).items() if _differ(value, after.get(name))}


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return one is not other and bool(one != other)


def _refilled(container: Any, content: Any) -> Any:
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)
    return container

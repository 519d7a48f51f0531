"""Takes back an optimizer's step, to the last bit, by copies.

Before the step, the parameters, `optimizer.state` and the options in `optimizer.param_groups` are copied, and
the gradients where the step changes them. The copies exist from the update until its verdict: `keep`
allocates them, and `forget` frees them for activations.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zbpp.runtime.processes.dtensors import local_of

Values = dict[str, Any]


class Rollback:
    """The copies with which the last step of an optimizer is taken back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._changes_gradients = optimizer, changes_gradients(optimizer)
        self._pairs: list[tuple[Tensor, Tensor]] = []  # what the step changes in place, and its copy
        self._states: dict[Any, Any] | None = None
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        self._before: list[Values] = []  # the options of each group
        self._after: list[Values] = []

    def keep(self, *, steps: bool = True, scales: bool = False) -> None:
        """Copy what the step may change. scales: whether the caller scales the gradients in place before it.

        steps: whether a step follows; otherwise only options may change until `undone`.
        """
        parameters = parameters_of(self._optimizer)
        self._gradients = [(each, each.grad) for each in parameters]
        self._before = [options_of(group) for group in self._optimizer.param_groups]
        if not steps:
            return
        self._states = {key: _copied(state) for key, state in self._optimizer.state.items()}
        gradients = [each.grad for each in parameters if scales or self._changes_gradients]
        changed = [local_of(each.detach()) for each in (*parameters, *gradients) if each is not None]
        self._pairs = [(each, each.clone()) for each in changed]

    def after_step(self) -> None:
        """Called after `keep`, and after the step, if there was one: remember the options as they are now."""
        self._after = [options_of(group) for group in self._optimizer.param_groups]

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Take back the step and the scaling; within this context the caller may redo both.

        Within the context the optimizer's options (such as the learning rate) have the values that they had
        at `keep`. Afterwards options that the caller changed after the step have their new values again.
        Gradients that the caller dropped (`zero_grad()` between two steps) are back.
        """
        groups = self._optimizer.param_groups  # one that was added since the step has no part in it
        changes = [_changes(group, after) for group, after in zip(groups, self._after, strict=False)]
        for group, before in zip(groups, self._before, strict=False):
            for name in set(options_of(group)) - set(before):
                del group[name]
            _set(group, before)
        if self._states is not None:
            self._optimizer.state.clear()
            self._optimizer.state.update(self._states)
        with torch.no_grad():
            for parameter, gradient in self._gradients:
                parameter.grad = gradient
            for original, kept in self._pairs:
                original.copy_(kept)
        try:
            yield
        finally:
            for group, change in zip(groups, changes, strict=False):
                _set(group, change)

    def tensors(self) -> list[Tensor]:
        """The copies."""
        states = [each for each in tree_leaves(self._states) if isinstance(each, Tensor)]
        return [*(kept for _, kept in self._pairs), *states]

    def forget(self) -> None:
        """Free the copies: the step will not be taken back. `undone` needs another `keep` then."""
        self._pairs, self._states, self._gradients = [], None, []


def changes_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step may change gradients; torch's leave them as they are."""
    return not f"{type(optimizer).__module__}.".startswith(("torch.optim.", "zbpp."))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of the optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def options_of(group: Values) -> Values:
    """Copies of the options of a group."""
    return {name: _copied(value) for name, value in group.items() if name != "params"}


def _changes(group: Values, after: Values) -> Values:
    """The options of a group that differ from `after`."""
    return {name: value for name, value in options_of(group).items() if _differ(value, after.get(name))}


def _set(group: Values, options: Values) -> None:
    for name, value in options.items():
        if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
            group[name].copy_(value)  # a captured step may hold this tensor
        else:
            group[name] = value


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return bool(one != other)


def _copied(value: Any) -> Any:
    """A copy of a nest of dicts, lists and tuples of tensors and other values."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*map(_copied, value)]
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    return copy.deepcopy(value)

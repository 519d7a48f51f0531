"""Finds out whether weights, gradients or optimizer states have changed since an update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbpp.autograd.leaf_grad import total_of
from zbpp.runtime.mesh import local_of


class _Version(NamedTuple):
    """A parameter, its version counter, its gradient, and the gradient's version counter."""

    parameter: nn.Parameter
    version: int
    total: Tensor | None
    total_version: int


class AfterUpdate:
    """The parameters, gradients and optimizer states as an update has left them."""

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._versions = [*map(_version_of, parameters)]
        self._optimizer, self._states = optimizer, [*_marks(optimizer.state)]

    def check(self, *, needs_gradients: bool) -> None:
        """Check that weights and states have not changed; with needs_gradients, nor have gradients.

        A gradient that was set to None is put back. Raises RuntimeError for any other change.
        """
        for parameter, version, total, total_version in self._versions:
            if parameter._version != version:
                raise RuntimeError(
                    "a weight was changed between an update and the gate of the next step (by "
                    "optimizer.step(), by load_state_dict of a module, or in forward): PostValidation makes "
                    "the update itself; call its settle() before weights are changed"
                )
            if not needs_gradients or total is None:
                continue
            if total_of(parameter) is None:
                parameter.grad = total  # zero_grad() between steps
            if total_of(parameter) is not total or local_of(total)._version != total_version:
                raise RuntimeError(
                    "gradients were changed between an update and the gate of the next step, but the update "
                    "has to be redone with them: leave zero_grad and clipping to PostValidation"
                )
        if not _are_same(self._states, [*_marks(self._optimizer.state)]):
            raise RuntimeError(
                "the optimizer's states were changed between an update and the gate of the next step (by "
                "optimizer.state.clear() or optimizer.load_state_dict(), say), and an update that is redone "
                "would undo the change: call settle() of PostValidation before states are changed"
            )


def _version_of(parameter: nn.Parameter) -> _Version:
    total = total_of(parameter)
    return _Version(parameter, parameter._version, total, 0 if total is None else local_of(total)._version)


def _marks(value: Any) -> Iterator[tuple[Any, int]]:
    """For each part of a nest of dicts, lists and tuples: the part, and its version or length (else 0)."""
    if isinstance(value, Tensor):
        yield value, local_of(value)._version
    elif isinstance(value, dict):
        # Reading `optimizer.state[parameter]` makes an empty dict: that is no change.
        items = [(key, each) for key, each in value.items() if not (isinstance(each, dict) and not each)]
        yield value, len(items)
        for key, each in items:
            yield key, 0
            yield from _marks(each)
    elif isinstance(value, list | tuple):
        yield value, len(value)
        for each in value:
            yield from _marks(each)
    else:
        yield value, 0


def _are_same(ones: list[tuple[Any, int]], others: list[tuple[Any, int]]) -> bool:
    return len(ones) == len(others) and all(
        number == other_number and (one is other or _are_equal(one, other))
        for (one, number), (other, other_number) in zip(ones, others, strict=True)
    )


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two constants are equal. Tensors and containers are the same only if they are one object."""
    if isinstance(one, Tensor | dict | list) or isinstance(other, Tensor | dict | list):
        return False
    return isinstance(one, tuple) or bool(one == other)

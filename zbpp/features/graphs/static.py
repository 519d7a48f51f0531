"""What a captured step reads and writes, at fixed addresses: inputs, targets and keywords, and gradients.

Inputs, targets and keywords are copied into buffers. A parameter's `.grad` is the same tensor in every
captured step. When a step begins, a `.grad` may be
    None (zero_grad)        the fixed tensor is zeroed, and becomes the `.grad`
    the fixed tensor        the step adds to it
    another tensor          its values are copied into the fixed tensor, which becomes the `.grad`

So a `.grad` that a user keeps from an earlier step changes in the next one: clone it. A parameter with a
`main_grad` has its gradients added there; that tensor must stay the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from zbpp.autograd.leaf_grad import new_gradient
from zbpp.runtime.call.feed import Feed

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))

Key = tuple[Any, ...]


def key_of(feeds: Mapping[int, Feed]) -> Key:
    """What two steps must have alike to be served by the same graphs; tensors may have other values."""
    leaves, spec = _flat(feeds)
    number_of = {key: number for number, key in enumerate(_distinct(leaves))}  # stages share keywords
    return spec, *[
        _kind(each, number_of[id(each)]) if isinstance(each, Tensor) else _constant(each) for each in leaves
    ]


def _kind(tensor: Tensor, number: int) -> Key:
    return number, tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad


def _constant(value: Any) -> Key:
    # 1, 1.0 and True are equal, but not the same. Of other objects, only the identity is known.
    return type(value), value if isinstance(value, _CONSTANTS) else id(value)


def _flat(feeds: Mapping[int, Feed]) -> tuple[list[Any], Any]:
    return tree_flatten([(feed.args, feed.kwargs, feed.targets, feed.weights) for feed in feeds.values()])


def _distinct(leaves: Iterable[Any]) -> dict[int, Tensor]:
    return {id(each): each for each in leaves if isinstance(each, Tensor)}


class StaticInputs:
    """The feeds of a step, with buffers in the place of their tensors. Without seeds: a replay sets them.

    Raises ValueError for a tensor that can't be copied into a buffer.
    """

    def __init__(self, feeds: Mapping[int, Feed], device: torch.device) -> None:
        leaves, spec = _flat(feeds)
        tensors = _distinct(leaves)
        for each in tensors.values():
            _refuse(each, device)
        buffers = {key: torch.empty_like(each) for key, each in tensors.items()}
        given = tree_unflatten([buffers.get(id(each), each) for each in leaves], spec)
        self.feeds = {
            stage: feed._replace(args=args, kwargs=kwargs, targets=targets, weights=weights, seeds=None)
            for (stage, feed), (args, kwargs, targets, weights) in zip(feeds.items(), given, strict=True)
        }
        self._buffers = [*buffers.values()]
        self.load(feeds)

    @torch.no_grad()
    def load(self, feeds: Mapping[int, Feed]) -> None:
        """Copy the tensors of feeds with the same key into the buffers."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, [*_distinct(_flat(feeds)[0]).values()])


def _refuse(tensor: Tensor, device: torch.device) -> None:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(f"the step was given a {type(tensor).__name__} that is not a plain dense tensor")
    if tensor.requires_grad:
        raise ValueError(
            "the step was given a tensor that requires grad, whose graph is another one each time"
        )
    if tensor.device.type != device.type:
        raise ValueError(f"the step was given a tensor on {tensor.device}, and the stages are on {device}")


class StaticGradients:
    """The gradients of parameters: `attach`, the capture, `captured`, `detach`; then a `begin` per step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [
            each
            for each in dict.fromkeys(parameters)
            if each.requires_grad and getattr(each, "main_grad", None) is None
        ]
        self._before = [each.grad for each in self._parameters]
        self._fixed: list[tuple[nn.Parameter, Tensor]] = []
        self._versions: list[int] = []

    @torch.no_grad()
    def attach(self) -> None:
        """Give each parameter the tensor that the captured step adds to."""
        self._fixed = [(each, new_gradient(each).zero_()) for each in self._parameters]
        self._versions = [fixed._version for _, fixed in self._fixed]
        for parameter, fixed in self._fixed:
            parameter.grad = fixed

    def detach(self) -> None:
        """Give each parameter the `.grad` that it had before `attach`."""
        for parameter, grad in zip(self._parameters, self._before, strict=True):
            parameter.grad = grad
        self._before = []

    def captured(self) -> None:
        """The capture has run: keep the tensors that it adds to. A parameter without a gradient keeps none.

        Raises ValueError if the capture has put another tensor in the place of a `.grad`.
        """
        for parameter, fixed in self._fixed:
            if parameter.grad is not fixed:
                raise ValueError("a gradient is not added to a dense `.grad` in place: is it sparse?")
        rows = zip(self._fixed, self._versions, strict=True)
        self._fixed = [row for row, version in rows if row[1]._version > version]

    @torch.no_grad()
    def begin(self) -> None:
        """A replayed step begins."""
        zeroed = [fixed for parameter, fixed in self._fixed if parameter.grad is None]
        copied = [
            (fixed, parameter.grad)
            for parameter, fixed in self._fixed
            if parameter.grad is not None and parameter.grad is not fixed
        ]
        if zeroed:
            torch._foreach_zero_(zeroed)
        for fixed, grad in copied:
            fixed.copy_(grad)
        for parameter, fixed in self._fixed:
            parameter.grad = fixed

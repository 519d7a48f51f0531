"""Gradients at fixed addresses: in every captured step a parameter's `.grad` is the same tensor.

When a step begins, a `.grad` may be
    None (zero_grad)        the fixed tensor is zeroed, and becomes the `.grad`
    the fixed tensor        the step adds to it
    another tensor          its values are copied into the fixed tensor, which becomes the `.grad`

So a `.grad` that a user keeps from an earlier step changes in the next one: clone it. A parameter with a
`main_grad` has its gradients added there; that tensor must stay the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zbpp.autograd.leaf_grad import new_gradient


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

"""Gradients at fixed addresses: in every captured step a parameter's `.grad` is the same tensor.

When a step begins, a `.grad` may be
    None (zero_grad)        the fixed tensor is zeroed, and becomes the `.grad`
    the fixed tensor        the step adds to it
    another tensor          its values are copied into the fixed tensor, which becomes the `.grad`

So a `.grad` that a user keeps from an earlier step changes in the next one: clone it. A parameter with a
`main_grad` has its gradients added there; that tensor must stay the same one (relied_on.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zbpp.autograd.leaf_grad import new_gradient
from zbpp.runtime.graphs.maker import NotCapturable


class StaticGradients:
    """The gradients of some parameters: `attach`, the capture, `captured`; then a `begin` per step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [
            each for each in parameters if each.requires_grad and getattr(each, "main_grad", None) is None
        ]
        self._before: list[Tensor | None] = []
        self._fixed: list[tuple[nn.Parameter, Tensor]] = []
        self._versions: list[int] = []

    @torch.no_grad()
    def attach(self) -> None:
        """Give each parameter the tensor that the captured step adds to."""
        self._before = [each.grad for each in self._parameters]
        for parameter, grad in zip(self._parameters, self._before, strict=True):
            fixed = new_gradient(parameter).zero_()
            if grad is not None:
                _refuse_other(parameter, grad, fixed)
                fixed.copy_(grad)
            parameter.grad = fixed
            self._fixed.append((parameter, fixed))
        self._versions = [fixed._version for _, fixed in self._fixed]

    def detach(self) -> None:
        """Give each parameter the `.grad` that it had before `attach`."""
        for parameter, grad in zip(self._parameters, self._before, strict=False):
            parameter.grad = grad

    def captured(self) -> None:
        """The capture has run: keep the tensors that it adds to, and detach all.

        Raises NotCapturable if the capture has put another tensor in the place of a `.grad`.
        """
        rows = [(*each, version) for each, version in zip(self._fixed, self._versions, strict=True)]
        is_replaced = any(parameter.grad is not fixed for parameter, fixed, _ in rows)
        self.detach()
        if is_replaced:
            raise NotCapturable("a gradient is not added to a dense `.grad` in place (is it sparse?)")
        # Also a capture counts the changes of a tensor. A parameter without a gradient keeps none.
        self._fixed = [(parameter, fixed) for parameter, fixed, version in rows if fixed._version > version]
        self._before.clear()

    @torch.no_grad()
    def begin(self) -> None:
        """A replayed step begins. Raises NotCapturable, and changes nothing, for another kind of `.grad`."""
        zeroed: list[Tensor] = []
        copied: list[tuple[Tensor, Tensor]] = []
        for parameter, fixed in self._fixed:
            grad = parameter.grad
            if grad is None:
                zeroed.append(fixed)
            elif grad is not fixed:
                _refuse_other(parameter, grad, fixed)
                copied.append((fixed, grad))
        if copied:
            copied = self._without_overlap(copied)
        if zeroed:
            torch._foreach_zero_(zeroed)
        if copied:
            torch._foreach_copy_([fixed for fixed, _ in copied], [grad for _, grad in copied])
        # A replay does not count as a change of a tensor; a step that fails half-way must find it changed.
        torch.autograd.graph.increment_version(
            [each.grad for each, _ in self._fixed if each.grad is not None]
        )
        for parameter, fixed in self._fixed:
            parameter.grad = fixed

    def _without_overlap(self, copied: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Copies that may run in any order, although weights may have exchanged their gradients.

        Raises NotCapturable if two weights have one gradient: in an eager step both add to it.
        """
        grads = [each.grad.data_ptr() for each, _ in self._fixed if each.grad is not None and each.numel()]
        if len({*grads}) < len(grads):
            raise NotCapturable("two weights have one tensor as their `.grad`")
        places = {fixed.data_ptr() for _, fixed in self._fixed}
        return [(fixed, grad.clone() if grad.data_ptr() in places else grad) for fixed, grad in copied]


def _refuse_other(parameter: Tensor, grad: Tensor, fixed: Tensor) -> None:
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.dtype != fixed.dtype:
        raise NotCapturable(
            f"the `.grad` of a weight of shape {tuple(parameter.shape)} is {grad.dtype}, {grad.layout}: "
            "set it to None"
        )

"""What a step is given, at fixed addresses: its inputs, targets and keywords are copied into buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from zbpp.runtime.feed import Call
from zbpp.runtime.graphs.maker import NotCapturable
from zbpp.runtime.microbatch import PerMicrobatch, Replicated

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice, range)


class CallLayout(NamedTuple):
    """What two calls must have alike to be served by the same graphs; tensors may have other values."""

    specs: tuple[TreeSpec, ...]
    leaves: tuple[Any, ...]  # (type, value) of constants, and (dtype, shape, strides) of tensors

    def changed(self, before: CallLayout) -> str:
        """What is different from an earlier call's, the first thing found."""
        for one, other in zip(before.leaves, self.leaves, strict=False):
            if one != other:
                has_numbers = _is_number(one) and _is_number(other)
                advice = " (a tensor may change)" if has_numbers else ""
                return f"the call was given {_shown(one)}, then {_shown(other)}{advice}"
        return "the structure of what the call is given has changed"


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and leaf[0] in (int, float, complex)


def _shown(leaf: Any) -> str:
    match leaf:
        case (_, value):
            return repr(value)
        case (dtype, shape, _):
            return f"a tensor of shape {tuple(shape)} and {dtype}"
    return str(leaf)


class _Described:
    """Goes over the values of a call: their tensors, and their layout."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = []
        self.specs: list[TreeSpec] = []
        self.leaves: list[Any] = []

    def add(self, value: Any) -> None:
        leaves, spec = tree_flatten(value, is_leaf=_is_marked)
        self.specs.append(spec)
        for leaf in leaves:
            self._add_leaf(leaf)

    def _add_leaf(self, leaf: Any) -> None:
        if isinstance(leaf, Replicated | PerMicrobatch):
            self.leaves.append(type(leaf))
            self.add(leaf.value if isinstance(leaf, Replicated) else leaf.values)
        elif isinstance(leaf, Tensor):
            _refuse_tensor(leaf, self.device)
            self.tensors.append(leaf)
            self.leaves.append((leaf.dtype, leaf.shape, leaf.stride()))
        elif isinstance(leaf, _CONSTANTS):
            self.leaves.append((type(leaf), leaf))  # 1, 1.0 and True are equal, but not the same
        else:
            kind = type(leaf).__name__
            raise NotCapturable(
                f"the call has a {kind}, and a replay would not see changes in it: pass tensors and numbers"
            )


def _refuse_tensor(tensor: Tensor, device: torch.device) -> None:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        raise NotCapturable(f"the call has a {type(tensor).__name__} that is not a plain dense tensor")
    if tensor.requires_grad:
        raise NotCapturable("the call has a tensor that requires grad, whose graph is another one each time")
    if tensor.device.type != device.type:
        raise NotCapturable(f"the call has a tensor on {tensor.device}, the stages are on {device}")


def _is_marked(value: Any) -> bool:
    return isinstance(value, Replicated | PerMicrobatch)


def _described(call: Call, device: torch.device) -> _Described:
    found = _Described(device)
    for value in (call.args, call.target, dict(call.kwargs)):
        found.add(value)
    return found


def layout_of_call(call: Call, device: torch.device) -> CallLayout:
    """The layout of a call. Raises NotCapturable for a value that can't be copied into a buffer."""
    found = _described(call, device)
    return CallLayout(tuple(found.specs), tuple(found.leaves))


class StaticCall:
    """A call's values, with buffers in the place of its tensors. Raises NotCapturable, see layout_of_call."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []
        values = (call.args, call.target, dict(call.kwargs))
        layout_of_call(call, device)
        args, target, kwargs = _with_tensors(values, self._buffer)
        self.call = call._replace(args=args, target=target, kwargs=kwargs)

    def _buffer(self, tensor: Tensor) -> Tensor:
        is_expanded = any(
            step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
        )
        stride = tensor.contiguous().stride() if is_expanded else tensor.stride()
        self._buffers.append(
            torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        )
        return self._buffers[-1]

    @torch.no_grad()
    def load(self, call: Call) -> None:
        """Copy the tensors of a call with the same layout into the buffers."""
        tensors = _described(call, self._device).tensors
        if tensors:
            torch._foreach_copy_(self._buffers, tensors)


def _with_tensors(value: Any, replaced: Callable[[Tensor], Tensor]) -> Any:
    """The value with other tensors, also inside the marks."""

    def leaf(each: Any) -> Any:
        if isinstance(each, Replicated):
            return Replicated(_with_tensors(each.value, replaced))
        if isinstance(each, PerMicrobatch):
            return PerMicrobatch(_with_tensors(each.values, replaced))
        return replaced(each) if isinstance(each, Tensor) else each

    return tree_map(leaf, value, is_leaf=_is_marked)

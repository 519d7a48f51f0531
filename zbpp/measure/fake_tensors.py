"""torch's fake tensors, which have no memory; here small tensors of integers and booleans have values.

A model may ask for values: whether a mask has padding, whether positions begin again within a row. These
follow from integers of the batch alone. So an operator on small tensors of integers runs on real ones, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import swap_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

_MOST = 2**20  # entries: positions and padding, but no masks over pairs of tokens

_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)

_GROUPED = torch.ops.aten._grouped_mm.default


class FakeTensors(TorchDispatchMode):
    """Within the block, tensors are fake. It may be entered again afterwards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._fake = FakeTensorMode()
        self._values = WeakTensorKeyDictionary()
        # Module.to would swap a fake parameter, which torch refuses: its own mode has a weak reference.
        self._to = patch.object(torch.utils, "swap_tensors", _convert)
        # copy.deepcopy of a module would ask a fake parameter for its address.
        self._copy = patch.object(FakeTensor, "__deepcopy__", _copied, create=True)

    def __enter__(self) -> Self:
        self._to.__enter__()
        self._copy.__enter__()
        self._fake.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        self._fake.__exit__(*error)
        self._copy.__exit__(*error)
        self._to.__exit__(*error)

    def faked(self, value: Any) -> Any:
        """A fake tensor in place of a real one; all else as it is."""
        if not isinstance(value, Tensor):
            return value
        found = self._fake.from_tensor(value)
        self._keep([found], [value.clone()])  # operators in place also change it
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _GROUPED and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args[:3])
        if args and isinstance(args[0], Tensor) and args[0].is_floating_point() and not kwargs:
            return func(*args)
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_known = all(map(self._is_known, given))
        is_known &= torch.Tag.nondeterministic_seeded not in func.tags
        if is_known and given and func in _READS:
            return self._of_values(func, args, kwargs)
        result = func(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if is_known and made and all(map(_is_small, made)):
            values = tree_leaves(self._of_values(func, args, kwargs))
            self._keep(made, [each for each in values if isinstance(each, Tensor)])
        elif func._schema.is_mutable:
            self._forget(given)
        return result

    def _of_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map_only(Tensor, self._value_of, (args, kwargs))
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _is_known(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) or tensor in self._values

    def _value_of(self, tensor: Tensor) -> Tensor:
        """A real tensor: torch.tensor(3) first makes one, of which it then makes a fake one."""
        value: Tensor = self._values[tensor] if isinstance(tensor, FakeTensor) else tensor
        return value

    def _keep(self, made: Iterable[Tensor], values: Iterable[Any]) -> None:
        for each, value in zip(made, values, strict=True):
            if _is_small(each):
                self._values[each] = value

    def _forget(self, given: Iterable[Tensor]) -> None:
        """Forget the values of all tensors that share memory with these."""
        written = {each.untyped_storage()._cdata for each in given}
        for each in [*self._values.keys()]:
            if each.untyped_storage()._cdata in written:
                del self._values[each]


def _convert(parameter: Tensor, converted: Tensor) -> None:
    """swap_tensors, but a fake parameter that stays a plain one gets the other's data."""
    if isinstance(converted, FakeTensor):
        parameter.data = converted.data
    else:  # it becomes a DTensor
        swap_tensors(parameter, converted)


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    copy: Tensor = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy, tensor.requires_grad)
    return memo.setdefault(id(tensor), copy)


def _is_small(tensor: Tensor) -> bool:
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return is_integer and tensor.numel() <= _MOST


def _grouped_product(x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor:
    """The output of _grouped_mm. torch 2.13 takes float32 on a CPU, but not in a FakeTensorMode."""
    if x.dim() == 2 and weight.dim() == 2:
        assert ends is not None
        shape: tuple[int, ...] = len(ends), x.shape[0], weight.shape[1]
    else:
        many = x.shape[:1] if x.dim() == weight.dim() == 3 else ()
        shape = *many, x.shape[-2], weight.shape[-1]
    aligned = 16 // x.element_size()  # rows begin at multiples of 16 bytes
    width = -(-shape[-1] // aligned) * aligned
    strides = (shape[-2] * width, width, 1)[-len(shape) :]
    return x.new_empty_strided(shape, strides)

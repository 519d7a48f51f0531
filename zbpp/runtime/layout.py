"""The layout of a message (dtypes, shapes, which tensors require grad), as text and as a header.

A message is a tuple of tensors. None in it stands for a gradient that does not exist, or for an output that a
stage left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Message = tuple[Tensor | None, ...]
Run = Callable[[Message], Message]
"""An instruction as a function: takes a message, returns a message; () stands for none."""

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
HEADER_SIZE = 256


class TensorLayout(NamedTuple):
    """What a receiver must know about one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """How many bytes the tensor has."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{name_of(self.dtype)}{list(self.shape)}"


Layout = tuple[TensorLayout | None, ...]


def name_of(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


def layout_of(message: Message) -> Layout:
    """The layout of each tensor of a message."""
    return tuple(
        [
            None if tensor is None else TensorLayout(tensor.dtype, tensor.shape, tensor.requires_grad)
            for tensor in message
        ]
    )


def describe(layout: Layout) -> str:
    """`(float32[4, 64, 128], None)`, for error messages."""
    return f"({', '.join(map(str, layout))})"


def describe_change(layout: Layout, known: Layout) -> str:
    """How requires_grad differs, which `describe` doesn't show; nothing if it is the same."""
    now, before = ([bool(each and each.requires_grad) for each in found] for found in (layout, known))
    return "" if now == before else f" (requires_grad {now} instead of {before})"


def encode(layout: Layout) -> Tensor:
    """A layout as int64[256].

    The number of tensors; then for each one its dtype's index, requires_grad, number of dims and sizes, or -1
    alone for None.
    """
    numbers = [len(layout)]
    for each in layout:
        if each is None:
            numbers.append(-1)
        elif each.dtype not in _DTYPES:
            raise ValueError(f"{each} can't be sent: cast it to one of {', '.join(map(name_of, _DTYPES))}")
        else:
            numbers += [_DTYPES.index(each.dtype), int(each.requires_grad), len(each.shape), *each.shape]
    if len(numbers) > HEADER_SIZE:
        raise ValueError(f"{len(layout)} tensors pass between two stages: too many for a header; stack some")
    return torch.tensor(numbers + [0] * (HEADER_SIZE - len(numbers)))


def decode(header: Tensor) -> Layout:
    """The inverse of `encode`."""
    numbers = iter(header.tolist())
    layout: list[TensorLayout | None] = []
    for _ in range(next(numbers)):
        dtype = next(numbers)
        if dtype < 0:
            layout.append(None)
            continue
        requires_grad, dims = bool(next(numbers)), next(numbers)
        layout.append(TensorLayout(_DTYPES[dtype], tuple(next(numbers) for _ in range(dims)), requires_grad))
    return tuple(layout)

"""The memory of offloaded weights: one piece of host memory per block, and device buffers.

A block's parameters lie one behind the other, at the same offsets in host memory and in every device buffer.
So a single copy moves a block, and a view of a weight has the same offset and strides in every buffer.

    host     the CPU's memory, pinned if the device is a GPU
    device   DeviceBuffers: two or more, of the largest block's size; while one is in use, another is filled
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zbpp.autograd.offload.host_memory import refuse_more_than_available
from zbpp.streams import Event, streams_of

_ALIGNMENT = 256  # bytes; kernels may round differently for another alignment


class OffloadError(RuntimeError):
    """The host has no room for weights or gradients that are to live there."""


def host_memory(nbytes: int, device: torch.device) -> Tensor:
    """Memory of the CPU, to be copied to `device` and back; pinned if the device is a GPU."""
    refuse_more_than_available(nbytes)
    streams = streams_of(device)
    return torch.empty(nbytes, dtype=torch.uint8) if streams is None else streams.host_memory(nbytes)


class Piece:
    """The layout of some tensors in one piece of memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._views: list[tuple[torch.dtype, int, torch.Size, tuple[int, ...]]] = []
        self.nbytes = 0
        for each in tensors:
            size = each.element_size()
            self._views.append((each.dtype, self.nbytes // size, each.shape, each.stride()))
            self.nbytes += max(1, -(-each.nbytes // _ALIGNMENT)) * _ALIGNMENT

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors, as views of this memory."""
        return [View(*each).of(memory) for each in self._views]


class View(NamedTuple):
    """The place of a tensor in a piece of memory; offset and strides are in elements."""

    dtype: torch.dtype
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]

    def of(self, memory: Tensor) -> Tensor:
        """The tensor, as a view of this memory, with a version counter of its own."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


class Content(Protocol):
    """Host memory that a device buffer can be filled with: a Block."""

    host: Tensor

    def version(self) -> int:
        """A number that grows when the content of `host` changes."""


class _Buffer:
    """A piece of device memory. content: what it holds; copied: on a GPU, the event at the copy's end."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.content: Content | None = None
        self.version = 0
        self.copied: Event | None = None


class DeviceBuffers:
    """Buffers on the device; the least recently used one is filled next.

    number: at least two. num_copies: how many times a buffer has been filled.

    On a GPU the copies run on a stream of their own, and read host memory after `load` and `prefetch` have
    returned. `finish` waits for them: only then may host memory change.
    """

    def __init__(self, nbytes: int, device: torch.device, number: int = 2) -> None:
        self.num_copies = 0
        self._streams = streams_of(device)
        self._stream = None if self._streams is None else self._streams.side("weights")
        self._buffers = [_Buffer(nbytes, device) for _ in range(number)]  # in the order of their last use
        self._in_use = self._buffers[0]

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(each.memory.nbytes for each in self._buffers)

    def memory(self) -> list[Tensor]:
        """The memory of all buffers."""
        return [each.memory for each in self._buffers]

    def load(self, content: Content) -> Tensor:
        """The buffer with this content, filled if need be. The buffer is in use until the next `load`."""
        self._in_use = buffer = self._find(content) or self._fill(content)
        self._touch(buffer)
        if self._streams is not None:
            self._streams.current().wait_event(buffer.copied)
        return buffer.memory

    def prefetch(self, contents: Iterable[Content]) -> None:
        """Start to fill a buffer that is not in use with each of these contents that no buffer holds."""
        for content in contents:
            self._touch(self._find(content) or self._fill(content))

    def any_memory(self) -> Tensor:
        """The memory of a buffer, for callers that need device memory with any content."""
        return self._in_use.memory

    def forget(self) -> None:
        """Drop the content of all buffers, since host memory may have changed: `load` copies again."""
        for each in self._buffers:
            each.content = None

    def _find(self, content: Content) -> _Buffer | None:
        version = content.version()
        for each in self._buffers:
            if each.content is content and each.version == version:
                return each
        return None

    def _touch(self, buffer: _Buffer) -> None:
        self._buffers.remove(buffer)
        self._buffers.append(buffer)

    def _fill(self, content: Content) -> _Buffer:
        buffer = next(each for each in self._buffers if each is not self._in_use)
        target = buffer.memory[: content.host.nbytes]
        buffer.content, buffer.version = content, content.version()
        self.num_copies += 1
        if self._streams is None or self._stream is None:
            target.copy_(content.host)
            return buffer
        self._stream.wait_stream(self._streams.current())  # it may read the old content
        with self._streams.use(self._stream):
            target.copy_(content.host, non_blocking=True)
            buffer.copied = self._stream.record_event()
        return buffer

    def finish(self) -> None:
        """Let the host wait for all copies to the buffers."""
        if self._stream is not None:
            self._stream.synchronize()


def num_buffers(budget: float | None, largest: int, num_blocks: int) -> int:
    """How many device buffers the budget allows, beside the gradients of one block; two without a budget.

    largest: the bytes of the largest block. Raises ValueError if the budget is below three times that.
    """
    if budget is None:
        return 2
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
        raise ValueError(f"budget={budget!r}: write a number of bytes, or None for the least")
    if 3 * largest > budget:
        least = math.ceil(3 * largest / 2**30 * 1e6) / 1e6
        raise ValueError(
            f"budget={budget} bytes is too small for offloaded weights: two buffers for weights and the "
            f"gradients of one block, each as large as the largest block, take {3 * largest} bytes; write a "
            f"budget of at least that (memory.weights_budget={least:g}), or make the blocks smaller"
        )
    fits = num_blocks if largest == 0 or math.isinf(budget) else int(budget // largest) - 1
    return max(2, min(num_blocks, fits))


def is_dense(parameter: nn.Parameter) -> bool:
    """Whether the parameter's elements fill its memory without gaps, in any order of dimensions."""
    extent = sum(
        (size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
    )
    return parameter.numel() == 0 or extent + 1 == parameter.numel()

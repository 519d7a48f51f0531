"""The memory of offloaded weights: one piece of host memory per block, and two buffers on the device.

A block's parameters lie one behind the other, at the same offsets in host memory and in both device buffers.
So a single copy moves a block, and a view of a weight has the same offset and strides in both buffers.

    host     the CPU's memory, pinned if the device is a GPU
    device   DeviceBuffers: two of the largest block's size; while one is in use, the other is filled
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zbpp.streams import Event, streams_of

_ALIGNMENT = 256  # bytes; kernels may round differently for another alignment


class Piece:
    """The layout of some tensors in one piece of memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._views: list[View] = []
        self.nbytes = 0
        for each in tensors:
            offset = self.nbytes // each.element_size()
            self._views.append(View(each.dtype, offset, each.shape, each.stride()))
            self.nbytes += max(1, -(-each.nbytes // _ALIGNMENT)) * _ALIGNMENT

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors, as views of this memory."""
        return [each.of(memory) for each in self._views]


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
    """What a device buffer can be filled with: a Block."""

    host: Tensor


class _Buffer:
    """A piece of device memory. content: what it holds; copied: on a GPU, the event at the copy's end."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.content: Content | None = None
        self.copied: Event | None = None


class DeviceBuffers:
    """Two buffers on the device.

    On a GPU the copies run on a stream of their own, and read host memory after `load` and `prefetch` have
    returned. `finish` waits for them: only then may host memory change.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._stream = None if self._streams is None else self._streams.side("weights")
        self._buffers = _Buffer(nbytes, device), _Buffer(nbytes, device)
        self._in_use = self._buffers[0]

    def memory(self) -> list[Tensor]:
        """The memory of both buffers."""
        return [each.memory for each in self._buffers]

    def load(self, content: Content) -> Tensor:
        """The buffer with this content, filled if need be. The buffer is in use until the next `load`."""
        self._in_use = buffer = self._filled(content)
        if self._streams is not None and buffer.copied is not None:
            self._streams.current().wait_event(buffer.copied)
        return buffer.memory

    def prefetch(self, content: Content) -> None:
        """Start to fill the buffer that is not in use with this content, unless one has it already."""
        self._filled(content)

    def any_memory(self) -> Tensor:
        """The memory of a buffer, for callers that need device memory with any content."""
        return self._in_use.memory

    def forget(self) -> None:
        """Drop the content of both buffers, since host memory may have changed: `load` copies again."""
        for each in self._buffers:
            each.content = None

    def finish(self) -> None:
        """Let the host wait for all copies to the buffers."""
        if self._stream is not None:
            self._stream.synchronize()

    def _filled(self, content: Content) -> _Buffer:
        for each in self._buffers:
            if each.content is content:
                return each
        one, other = self._buffers
        buffer = other if one is self._in_use else one
        buffer.content = content
        target = buffer.memory[: content.host.nbytes]
        if self._streams is None or self._stream is None:
            target.copy_(content.host)
            return buffer
        self._stream.wait_stream(self._streams.current())  # it may read the old content
        with self._streams.use(self._stream):
            target.copy_(content.host, non_blocking=True)
            buffer.copied = self._stream.record_event()
        return buffer

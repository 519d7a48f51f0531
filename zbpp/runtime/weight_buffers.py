"""Where offloaded weights are: each block's in one piece of host memory, and in a device buffer while in use.

A block's parameters lie in its piece one behind the other, at the same places in host memory and in a device
buffer: so one copy brings a block, and a view of a weight in one buffer is the same view in the other.

    host     MemoryHost (pinned if the device is a GPU) or FileHost (a file per block, mapped into memory)
    device   DeviceBuffers: two or more, of the largest block's size: while one is in use, another is filled.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zbpp.autograd.host_memory import refuse_more_than_available

_ALIGNMENT = 256  # bytes: what kernels compute may depend on the alignment


class Host(Protocol):
    """Memory outside the device."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """So many bytes, from which copies go to `device`."""


class MemoryHost:
    """The CPU's memory, pinned if the device is a GPU."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        refuse_more_than_available(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class FileHost:
    """Files in a folder, mapped into memory; each is deleted when nothing refers to it any more."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder, self._number = Path(folder), 0

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"weights-{os.getpid()}-{self._number}"
        self._number += 1
        with path.open("x+b") as file:
            path.unlink()  # the mapping keeps the memory of the file
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk is an error here, not a crash later
            mapped = mmap.mmap(file.fileno(), nbytes)
        # Not torch.from_file: torch's profiler would count the file as the CPU's memory.
        return torch.frombuffer(mapped, dtype=torch.uint8)


class Piece:
    """The places of some tensors in one piece of memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._views: list[tuple[torch.dtype, int, torch.Size, tuple[int, ...]]] = []
        self.nbytes = 0
        for each in tensors:
            size = each.element_size()
            self._views.append((each.dtype, self.nbytes // size, each.shape, each.stride()))
            self.nbytes += max(1, -(-each.nbytes // _ALIGNMENT)) * _ALIGNMENT

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in this memory."""
        return [View(*each).of(memory) for each in self._views]


class View(NamedTuple):
    """A tensor in a piece of memory: offset and strides count elements."""

    dtype: torch.dtype
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]

    def of(self, memory: Tensor) -> Tensor:
        """The view of this memory. It has a count of in-place changes of its own."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


class Content(Protocol):
    """What a buffer can be filled with."""

    host: Tensor

    def version(self) -> int:
        """A number that grows when the content of `host` changes."""


class _Buffer:
    """A piece of device memory, and what it holds. copied: the event after which it does, on CUDA."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.content: Content | None = None
        self.version = 0
        self.copied: Any = None


class DeviceBuffers:
    """Buffers on the device; the one that was used longest ago is filled next.

    number: at least two. num_copies: how often one was filled.
    """

    def __init__(self, nbytes: int, device: torch.device, number: int = 2) -> None:
        self._device, self.num_copies = device, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = [_Buffer(nbytes, device) for _ in range(number)]  # in the order of their last use
        self._in_use = self._buffers[0]

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        return sum(each.memory.nbytes for each in self._buffers)

    def memory(self) -> list[Tensor]:
        """Both buffers."""
        return [each.memory for each in self._buffers]

    def load(self, content: Content) -> Tensor:
        """The buffer that holds this content, for the work that is started next. It is then in use."""
        self._in_use = buffer = self._find(content) or self._fill(content)
        self._touch(buffer)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(buffer.copied)
        return buffer.memory

    def prefetch(self, contents: Iterable[Content]) -> None:
        """Begin to fill a buffer that is not in use."""
        for content in contents:
            self._touch(self._find(content) or self._fill(content))

    def some(self) -> Tensor:
        """One of the buffers, for those who need memory on the device and not what is in it."""
        return self._in_use.memory

    def forget(self) -> None:
        """Copy again whatever is loaded next: what is in host memory may have changed."""
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
        if self._stream is None:
            target.copy_(content.host)
            return buffer
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # what reads the old content
        with torch.cuda.stream(self._stream):
            target.copy_(content.host, non_blocking=True)
            buffer.copied = self._stream.record_event()
        return buffer


def num_buffers(budget: float | None, largest: int, num_blocks: int) -> int:
    """How many buffers the budget allows beside the gradients of a block; two without a budget."""
    if budget is None:
        return 2
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
        raise ValueError(f"budget={budget!r}: write a number of bytes, or None for the least")
    if 3 * largest > budget:
        raise ValueError(
            f"budget={budget} bytes is too small for offloaded weights: two buffers for weights and "
            f"the gradients of a block, each as large as the largest block, are {3 * largest} bytes; write a "
            "budget of at least that, or stages of smaller blocks"
        )
    fits = num_blocks if largest == 0 or math.isinf(budget) else int(budget // largest) - 1
    return max(2, min(num_blocks, fits))


def is_dense(parameter: nn.Parameter) -> bool:
    """Whether the parameter's elements lie side by side, in any order of dimensions."""
    extent = sum(
        (size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
    )
    return parameter.numel() == 0 or extent + 1 == parameter.numel()

"""Receive buffers: memory that messages are received into, used again when nothing refers to it any more."""

from __future__ import annotations

import torch
from torch import Tensor

from zbpp.runtime.layout import TensorLayout


class BufferPool:
    """Receive buffers, each given out again once nothing else refers to its memory.

    Users don't return a buffer, since they can't know when it is free: W's x may BE the received x. The
    reference count of the buffer's storage tells. A buffer serves any message that fills at least 16/17 of
    it. Before a new buffer is made, others that are free go: so the pool holds no more bytes than a call has
    had in use at once, whatever the sizes of its microbatches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[int, list[Tensor]] = {}  # by bytes
        self._most_used = 0  # the most bytes in use at once, where a buffer was made

    def take(self, layout: TensorLayout) -> Tensor:
        """A fresh tensor over the memory of a free buffer."""
        # A new tensor object: what a user sets on it (requires_grad, hooks) ends with this use.
        return tensor_in(self.free(layout), layout)

    def free(self, layout: TensorLayout) -> Tensor:
        """A buffer whose memory nothing else refers to, and that a tensor of this layout fits into."""
        needed = layout.num_bytes
        for size in [each for each in self._buffers if needed <= each <= needed + needed // 16]:
            for buffer in self._buffers[size]:
                if not _is_used(buffer):
                    return buffer
        self._make_room(needed)
        made = torch.empty(needed, dtype=torch.uint8, device=self.device)
        self._buffers.setdefault(needed, []).append(made)
        return made

    def _make_room(self, needed: int) -> None:
        """Drop free buffers, until all bytes with `needed` ones are no more than the most in use at once."""
        free = [each for each in self.buffers() if not _is_used(each)]
        num_free = sum(map(len, free))
        num_used = sum(size * len(kept) for size, kept in self._buffers.items()) - num_free + needed
        self._most_used = max(self._most_used, num_used)
        for buffer in free:
            if num_used + num_free <= self._most_used:
                break
            num_free -= len(buffer)
            kept = self._buffers[len(buffer)]
            kept[:] = [each for each in kept if each is not buffer]
            if not kept:
                del self._buffers[len(buffer)]

    def buffers(self) -> list[Tensor]:
        """All buffers that are kept."""
        return [each for kept in self._buffers.values() for each in kept]

    def clear(self) -> None:
        """Forget all buffers; those in use live as long as their users."""
        self._buffers.clear()
        self._most_used = 0

    def __len__(self) -> int:
        return sum(map(len, self._buffers.values()))


def _is_used(buffer: Tensor) -> bool:
    storage = buffer.untyped_storage()
    # One reference is the buffer's, one is `storage` itself.
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2


def tensor_in(buffer: Tensor, layout: TensorLayout) -> Tensor:
    """A tensor at the beginning of the buffer's memory; its contents are undefined."""
    tensor = torch.empty(0, dtype=layout.dtype, device=buffer.device)
    tensor.set_(buffer.untyped_storage(), 0, layout.shape)  # type: ignore[call-overload]  # no strides
    return tensor.requires_grad_(layout.requires_grad)

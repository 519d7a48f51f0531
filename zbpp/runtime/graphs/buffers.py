"""The buffers of captured messages: the same ones in every replay.

In the capture a buffer is given out as in an eager step, once nothing refers to its memory any more (see
BufferPool), and NotedBuffers notes which one it was. A replay writes and reads in the order of the capture,
so it takes the same buffers in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle

import torch
from torch import Tensor

from zbpp.runtime.layout import TensorLayout
from zbpp.runtime.links import BufferPool


class NotedBuffers(BufferPool):
    """Gives out buffers of a pool that others take from, too, and notes which."""

    def __init__(self, pool: BufferPool) -> None:
        super().__init__(pool.device)
        self._pool = pool
        self._noted: list[tuple[TensorLayout, Tensor]] = []

    def free(self, layout: TensorLayout) -> Tensor:
        """See BufferPool."""
        buffer = self._pool.free(layout)
        self._noted.append((layout, buffer))  # the pool's own tensor: no further use of its memory
        return buffer

    def tensors(self) -> list[Tensor]:
        """What was given out, in this order."""
        return [each.detach().requires_grad_(layout.requires_grad) for layout, each in self._noted]


class PlannedBuffers(BufferPool):
    """Gives out these tensors in turn, pass after pass."""

    def __init__(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        super().__init__(device)
        self._next = cycle(tensors)

    def take(self, layout: TensorLayout) -> Tensor:
        """The next tensor, which has this layout: messages of captured steps never change theirs."""
        return next(self._next)

"""Links: messages from one rank to another, in order, without waiting for each other.

A message is a tuple of tensors (None where a gradient does not exist). Of each channel, a kind
of message, the first is preceded by a header with dtypes and shapes; from then on the
layout is fixed, checked at the sender before anything is sent, and receives are posted ahead of
their use. (gloo checks neither shape nor dtype: too small a buffer aborts the process,
another dtype is silent garbage.)

    sender    header  x0   x1   x2        layout known: x1, x2 need no header
    receiver  header  x0  [x1] [x2]       [ ] posted ahead, as many as the plan has in flight

Each link has a process group of its own: on NCCL all that share a communicator is done in one order, and
a receive posted ahead would hold up a send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[Tensor | None, ...]

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_HEADER_SIZE = 256
_TAG_LIMIT = 2**30


class TensorLayout(NamedTuple):
    """What a receiver must know of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    def __str__(self) -> str:
        return f"{_name(self.dtype)}{list(self.shape)}"


Layout = tuple[TensorLayout | None, ...]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layout_of(message: Message) -> Layout:
    """The layout of each tensor of a message."""
    return tuple(
        None if tensor is None else TensorLayout(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
        for tensor in message
    )


def _gradient_change(layout: Layout, known: Layout) -> str:
    now, before = ([bool(each and each.requires_grad) for each in found] for found in (layout, known))
    return "" if now == before else f" (requires_grad {now} instead of {before})"


def describe(layout: Layout) -> str:
    """`(float32[4, 64, 128], None)`, for error messages."""
    return f"({', '.join(map(str, layout))})"


class BufferPool:
    """Receive buffers, used again once nothing else refers to their memory.

    Nobody returns a buffer: W's x can BE the received x, so only the storage's reference count
    knows. A pool grows to the plan's peak and stays there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[tuple[torch.dtype, tuple[int, ...]], list[Tensor]] = {}

    def take(self, layout: TensorLayout) -> Tensor:
        """A fresh tensor over memory that nothing else refers to; its contents are undefined."""
        buffers = self._buffers.setdefault((layout.dtype, layout.shape), [])
        buffer = next((each for each in buffers if _is_free(each)), None)
        if buffer is None:
            buffer = torch.empty(layout.shape, dtype=layout.dtype, device=self.device)
            buffers.append(buffer)
        # detach: an object of its own, so that requires_grad ends with this use
        return buffer.detach()

    def clear(self) -> None:
        """Forget all buffers; those in use live as long as their users."""
        self._buffers.clear()

    def __len__(self) -> int:
        return sum(map(len, self._buffers.values()))


def _is_free(buffer: Tensor) -> bool:
    storage = buffer.untyped_storage()
    # One reference is the buffer's, one is `storage` itself.
    return torch._C._storage_Use_Count(storage._cdata) <= 2


@dataclass(eq=False)
class Outbox:
    """The sending end of a link. `rank` and `peer` are ranks of `group`."""

    peer: int
    group: dist.ProcessGroup
    device: torch.device
    layouts: dict[Hashable, Layout] = field(default_factory=dict)
    _pending: deque[list[tuple[dist.Work, Tensor]]] = field(default_factory=deque)
    _num_sent: int = 0

    def send(self, channel: Hashable, message: Message) -> None:
        """Start to send; the tensors stay alive until `release`. Raises ValueError for a changed layout."""
        layout = layout_of(message)
        known = self.layouts.setdefault(channel, layout)
        if known is layout:
            works = [self._start(encode(layout).to(self.device))]
        elif known != layout:
            raise ValueError(
                f"{describe(layout)} is to be sent where {describe(known)} was sent before"
                f"{_gradient_change(layout, known)}: every microbatch of every step must have the same "
                "shapes and dtypes, and require grad alike"
            )
        else:
            works = []
        works += [self._start(tensor.detach().contiguous()) for tensor in message if tensor is not None]
        self._pending.append(works)

    def _start(self, tensor: Tensor) -> tuple[dist.Work, Tensor]:
        tag = self._num_sent % _TAG_LIMIT
        self._num_sent += 1
        work = dist.isend(tensor, group=self.group, group_dst=self.peer, tag=tag)
        assert work is not None  # only for ranks outside the group
        return work, tensor

    def release(self) -> None:
        """Wait for the oldest message to have been received, then let its memory go."""
        for work, _ in self._pending.popleft():
            work.wait()

    def finish(self) -> None:
        """Wait for all that is under way: the end of a pass."""
        while self._pending:
            self.release()
        self._num_sent = 0


class _Posted(NamedTuple):
    channel: Hashable
    header: tuple[dist.Work, Tensor] | None
    layout: Layout | None  # None: the header tells
    receives: list[tuple[dist.Work, Tensor] | None]


@dataclass(eq=False)
class Inbox:
    """The receiving end of a link.

    channels: of each message of a pass, in the order in which the link carries them.
    depth: how many receives to keep posted.
    """

    peer: int
    group: dist.ProcessGroup
    pool: BufferPool
    channels: Sequence[Hashable]
    depth: int
    layouts: dict[Hashable, Layout] = field(default_factory=dict)
    _posted: deque[_Posted] = field(default_factory=deque)
    _num_posted: int = 0
    _num_received: int = 0

    def begin(self) -> None:
        """Post the first receives of a pass."""
        self._num_posted = self._num_received = 0
        self._post_ahead()

    def receive(self) -> Message:
        """Wait for the next message; then post another receive in its place."""
        posted = self._posted.popleft()
        if posted.header is not None:
            posted = self._read_header(posted.channel, *posted.header)
        for receive in posted.receives:
            if receive is not None:
                receive[0].wait()
        self._post_ahead()
        assert posted.layout is not None  # read from the header above
        return tuple(
            None if receive is None or layout is None else receive[1].requires_grad_(layout.requires_grad)
            for receive, layout in zip(posted.receives, posted.layout, strict=True)
        )

    def _post_ahead(self) -> None:
        # Behind a header nothing can be posted: how many messages follow it is not known yet.
        while (
            len(self._posted) < max(self.depth, 1)
            and self._num_posted < len(self.channels)
            and not (self._posted and self._posted[-1].layout is None)
        ):
            channel = self.channels[self._num_posted]
            self._num_posted += 1
            layout = self.layouts.get(channel)
            if layout is None:
                header = self._start(torch.empty(_HEADER_SIZE, dtype=torch.int64, device=self.pool.device))
                self._posted.append(_Posted(channel, header, None, []))
            else:
                self._posted.append(self._post(channel, layout))

    def _read_header(self, channel: Hashable, work: dist.Work, header: Tensor) -> _Posted:
        work.wait()
        self.layouts[channel] = layout = decode(header)
        return self._post(channel, layout)

    def _post(self, channel: Hashable, layout: Layout) -> _Posted:
        receives = [None if each is None else self._start(self.pool.take(each)) for each in layout]
        return _Posted(channel, None, layout, receives)

    def _start(self, buffer: Tensor) -> tuple[dist.Work, Tensor]:
        tag = self._num_received % _TAG_LIMIT
        self._num_received += 1
        work = dist.irecv(buffer, group=self.group, group_src=self.peer, tag=tag)
        assert work is not None  # only for ranks outside the group
        return work, buffer


def encode(layout: Layout) -> Tensor:
    """A layout as int64[256]: count; then per tensor dtype (-1: None), requires_grad, rank, sizes."""
    numbers = [len(layout)]
    for each in layout:
        if each is None:
            numbers.append(-1)
        elif each.dtype not in _DTYPES:
            raise ValueError(f"{each} can't be sent: cast it to one of {', '.join(map(_name, _DTYPES))}")
        else:
            numbers += [_DTYPES.index(each.dtype), int(each.requires_grad), len(each.shape), *each.shape]
    if len(numbers) > _HEADER_SIZE:
        raise ValueError(f"{len(layout)} tensors pass between two stages: too many for a header; stack some")
    return torch.tensor(numbers + [0] * (_HEADER_SIZE - len(numbers)))


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

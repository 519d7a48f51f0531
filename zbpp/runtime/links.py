"""Links: messages from one rank to another, in order, sent and received while the rank computes.

The layout of a message (which tensors are None, and of the others dtype, shape and requires_grad) follows
from its channel and the size of its microbatch, see layouts.py. The first message of a channel and a size has
a header, which says the layout. From then on the sender checks each message against it before anything is
sent, and the receiver can start receives ahead of their use. (gloo checks nothing: a buffer that is too small
aborts the process, and another dtype gives wrong numbers without an error.)

    sender    header  x0   x1   x2        layout known: x1, x2 need no header
    receiver  header  x0  [x1] [x2]       [ ] started ahead, where the program says so (Post)

Behind a header nothing can be started: it says how many tensors follow it. A Post that stands there starts
its receive as soon as the header has come. With dynamic shapes every message has a header: each message costs
one more latency, and on CUDA a wait of the host.

The life of a receive buffer:
1. `Inbox.post`, an instruction of the program, takes it from the BufferPool and starts the receive.
2. `Inbox.receive`, another instruction, waits for the message and returns the buffer, as the message that an
   F, B or BW takes.
3. Nothing hands it back. F keeps it for B, B may keep it for W: W's x can BE it. `BufferPool.take` gives
   it out again once nothing refers to its memory any more, which is often after W.

The life of a sent tensor: `Outbox.send` starts the send and keeps the tensor; `Outbox.release`, an
instruction of the program, waits until it has been received and drops it. In between it must not change, see
in_place.py. An Update of a stage may write what messages have carried: it drops the messages that have been
received by then.

Each link has a process group of its own: NCCL runs everything that shares a communicator in one order, so a
receive started ahead would hold up a send. On NCCL `wait` makes the current stream wait, not the host. That
is enough for receive buffers and for sent tensors: a sent tensor is kept until that wait, and a buffer is
given out again only to a receive that starts on the current stream behind the buffer's readers. (This has not
been tested on several GPUs.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from zbpp.runtime.buffers import BufferPool
from zbpp.runtime.call.sizes import Size
from zbpp.runtime.host_links import OWN_LIMIT, HostLink, LinkGroup, Started
from zbpp.runtime.in_place import check_unchanged, versions_of
from zbpp.runtime.layout import (
    HEADER_SIZE,
    Layout,
    Message,
    decode,
    describe,
    describe_change,
    encode,
    layout_of,
)
from zbpp.runtime.layouts import Channel, Layouts, channel_of
from zbpp.schedule import Program, Recv, Send, Value

_TAG_LIMIT = 2**30
_SENT_AS_BYTES = {torch.int16, torch.uint16, torch.uint32, torch.uint64}


class Sent(NamedTuple):
    """A message whose sends have started. tensors: as the link has them. versions: their counts then."""

    channel: Channel
    tensors: list[Tensor]
    versions: list[int]
    works: list[Started]


@dataclass(eq=False)
class Outbox:
    """The sending end of a link. peer: the receiver's rank in `group`. limit: of a wait, see `OWN_LIMIT`."""

    peer: int
    group: LinkGroup
    device: torch.device
    layouts: Layouts = field(default_factory=Layouts)
    limit: timedelta = OWN_LIMIT
    _pending: deque[Sent] = field(default_factory=deque)
    _num_sent: int = 0

    def send(self, value: Value, message: Message) -> None:
        """Start to send; keeps the tensors until `release`. Raises ValueError for another layout."""
        layout = layout_of(message)
        self._check_places(message)
        tensors = [_as_stored(tensor) for tensor in message if tensor is not None]
        known = self.layouts.of(value)
        if known is None:
            self.layouts.learn(value, layout)
            tensors.insert(0, encode(layout).to(self.device))
        elif known != layout:
            raise ValueError(_refusal(layout, known, self.layouts.size_of(value)))
        versions = versions_of(tensors)
        works = [self._start(each) for each in tensors]
        self._pending.append(Sent(channel_of(value), tensors, versions, works))

    def _check_places(self, message: Message) -> None:
        for tensor in message:
            if tensor is None or tensor.device == self.device or isinstance(self.group, HostLink):
                continue
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}, and this rank sends from "
                f"{self.device}: make inputs by device=pipeline.device, and what a stage makes where its "
                "inputs are"
            )

    def _start(self, tensor: Tensor) -> Started:
        tensor = _as_known(tensor)
        self._num_sent += 1
        # This is dist.isend without its checks. gloo pairs sends and receives by their number on the link.
        return self.group.send([tensor], self.peer, self._num_sent % _TAG_LIMIT)

    def release(self) -> None:
        """Wait until the oldest message has been received, then let its memory go.

        Raises MessageChanged if it was changed in place since `send`.
        """
        _check(self._release())

    def release_received(self, from_stage: int) -> None:
        """Let the memory of all messages to this stage and to later ones go: the peer has received them.

        A Release of such a message does nothing. Raises MessageChanged as `release` does.
        """
        for place, sent in enumerate([*self._pending]):
            if sent.channel.stage >= from_stage:
                self._pending[place] = Sent(sent.channel, [], [], [])
                self._wait(sent)
                _check(sent)

    def finish(self) -> None:
        """End a pass over the program: wait until every message has been received."""
        while self._pending:
            self.release()

    def drop(self) -> None:
        """End a pass that begins again: its messages are not used, and may have changed."""
        while self._pending:
            self._release()

    def _release(self) -> Sent:
        sent = self._pending.popleft()
        self._wait(sent)
        return sent

    def _wait(self, sent: Sent) -> None:
        for work in sent.works:
            work.wait(self.limit)

    def close(self) -> None:
        """Give up the messages under way, and the link."""
        self._pending.clear()
        del self.group


def _refusal(layout: Layout, known: Layout, size: Size | None) -> str:
    of_size = "" if size is None else f" for a microbatch of the size {size}"
    return (
        f"the stage gave {describe(layout)}{of_size}; the messages before promised {describe(known)}"
        f"{describe_change(layout, known)}. For microbatches of one size a stage must always give the same "
        "shapes, dtypes and requires_grad, and its shapes must grow linearly with the size; if they depend "
        "on the values of the data, make the pipeline with dynamic_shapes=True"
    )


def _check(sent: Sent) -> None:
    check_unchanged(sent.channel, sent.tensors, sent.versions)


def _as_stored(tensor: Tensor) -> Tensor:
    """The tensor, contiguous; conjugate and negative views, whose memory holds other numbers, as copies."""
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def _as_known(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor, of a dtype that every backend has: NCCL has not all of them."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(-1).view(torch.uint8) if tensor.dtype in _SENT_AS_BYTES else tensor


class Posted(NamedTuple):
    """A receive that has started: of a message, or of its header where the layout is None."""

    value: Value
    layout: Layout | None
    works: list[Started]
    tensors: Message


@dataclass(eq=False)
class Inbox:
    """The receiving end of a link. peer: the sender's rank in `group`. limit: of a wait, see `OWN_LIMIT`."""

    peer: int
    group: LinkGroup
    pool: BufferPool
    layouts: Layouts = field(default_factory=Layouts)
    limit: timedelta = OWN_LIMIT
    _due: deque[Value] = field(default_factory=deque)  # messages behind a header
    _posted: deque[Posted] = field(default_factory=deque)
    _num_received: int = 0

    def post(self, value: Value) -> None:
        """Start to receive the link's next message, which is this value."""
        self._due.append(value)
        self._start_due()

    def receive(self) -> Message:
        """Wait for the message whose receive has started first."""
        posted = self._posted.popleft()
        if posted.layout is None:
            posted = self._after_header(posted)
            self._start_due()  # before the wait, which may be long
        for work in posted.works:
            work.wait(self.limit)
        return posted.tensors

    def drop(self, value: Value) -> None:
        """Receive the next message, whether its receive has started or not, and drop it."""
        if not self._posted:
            self.post(value)
        self.receive()

    def close(self) -> None:
        """Give up the messages under way, and the link."""
        self._posted.clear()
        self._due.clear()
        del self.group

    def _start_due(self) -> None:
        while self._due and not (self._posted and self._posted[-1].layout is None):
            value = self._due.popleft()
            self._posted.append(self._post(value, self.layouts.of(value)))

    def _post(self, value: Value, layout: Layout | None) -> Posted:
        """Start to receive a message, or its header where its layout is not known."""
        tensors: Message
        if layout is None:
            tensors = (torch.empty(HEADER_SIZE, dtype=torch.int64, device=self.pool.device),)
        else:
            tensors = tuple([None if each is None else self.pool.take(each) for each in layout])
        works = [self._start(tensor) for tensor in tensors if tensor is not None]
        return Posted(value, layout, works, tensors)

    def _after_header(self, posted: Posted) -> Posted:
        """Wait for a header, then start to receive what it announces."""
        posted.works[0].wait(self.limit)
        assert posted.tensors[0] is not None  # the header
        layout = decode(posted.tensors[0])
        self.layouts.learn(posted.value, layout)
        return self._post(posted.value, layout)

    def _start(self, buffer: Tensor) -> Started:
        buffer = _as_known(buffer)
        self._num_received += 1
        # This is dist.irecv without its checks.
        return self.group.recv([buffer], self.peer, self._num_received % _TAG_LIMIT)


Links = Mapping[tuple[int, int], LinkGroup]  # (sender, receiver) -> group


def make_inboxes(program: Program, links: Links, pool: BufferPool, layouts: Layouts) -> dict[int, Inbox]:
    """By sender."""
    rank = program.rank
    peers = sorted({each.peer for each in program.instructions if isinstance(each, Recv)})
    # A link's group has two ranks: 0 is the lower one.
    return {peer: Inbox(int(peer > rank), links[peer, rank], pool, layouts) for peer in peers}


def make_outboxes(
    program: Program, links: Links, device: torch.device, layouts: Layouts
) -> dict[int, Outbox]:
    """By receiver."""
    rank = program.rank
    peers = sorted({each.peer for each in program.instructions if isinstance(each, Send)})
    return {peer: Outbox(int(peer > rank), links[rank, peer], device, layouts) for peer in peers}

"""Links through host memory, for stages on GPUs in a job on gloo, which sends from host memory only.

    sender     current stream   .. F0 | F1 ..
               the link's own         [copy to the host]
               a thread                                 waits for the copy, then lets gloo send
    receiver   gloo                                            [receive]
               the link's own                                          [copy to the device]
               current stream                                                            | F0 ..

A HostLink stands in the place of a link's process group: it has `send` and `recv`, which return something to
wait for. They serve machines whose GPUs reach each other only through the host, and several ranks on one GPU.

It can't deadlock. The thread waits for the device alone. The device never waits for another rank, since a
copy to the device is queued only once its message is on the host. So each message leaves this rank as soon as
it is computed, whatever this rank's program waits for.

The life of memory:
- The copy to the host reads a sent tensor. `Outbox.release` frees the tensor after `wait`, which ends behind
  that copy.
- gloo holds the host memory while it sends or receives. torch's allocator of pinned memory gives this memory
  out again once the copies that use it have ended.
- A receive buffer is given out when the current stream has queued its last reader. `recv` then records an
  event in the current stream, and the copy into the buffer starts behind this event.

NOT RUN ON A GPU YET: tests/runtime/test_streams.py records the order of streams on the CPU.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.devices import backend_of, make_current
from zbpp.streams import Event, host_memory, streams_of

OWN_LIMIT = timedelta(0)
"""For torch: a wait lasts as long as the group's own timeout says."""


class Started(Protocol):
    """A send or a receive that has been started."""

    def wait(self, timeout: timedelta, /) -> Any:
        """Wait until a sent tensor may be changed and freed, or a received one read.

        On a GPU the current stream may wait in place of the host. timeout: how long at most; 0: the group's.
        """


class LinkGroup(Protocol):
    """What a link needs of a process group of two ranks: a ProcessGroup, or a HostLink."""

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> Started: ...
    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> Started: ...


def needs_host_link(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's messages can't start or end in memory of this device."""
    return device.type != "cpu" and backend_of(group, device) == "gloo"


def group_of(link: LinkGroup) -> LinkGroup:
    """The process group of a link: that of a HostLink sends from host memory."""
    return link.group if isinstance(link, HostLink) else link


class HostLink:
    """One rank's end of a link through host memory. group: of the link's two ranks; device: this rank's.

    On the CPU, which has no streams, the copies are done at once.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self._device = group, device
        self._streams = streams_of(device)
        self._stream: Any = None if self._streams is None else self._streams.side("messages")
        self._thread = ThreadPoolExecutor(1, "zbpp sends", make_current, (device,))

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Sent:
        """Start to send one contiguous tensor, after what the current stream has queued."""
        (tensor,) = tensors
        host = self._host_tensor(tensor)
        copied = self.copy(host, tensor, after=self.now())
        return Sent(self._thread.submit(self._send, tensor, host, copied, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Received:
        """Start to receive one contiguous tensor, whose memory the current stream has finished with."""
        (tensor,) = tensors
        host = self._host_tensor(tensor)
        return Received(self, self.group.recv([host], peer, tag), host, tensor, self.now())

    def close(self) -> dist.ProcessGroup:
        """End the thread; return the group, which the caller closes. Waits for the device, for no rank."""
        self._thread.shutdown(cancel_futures=True)
        return self.group

    def now(self) -> Event | None:
        """An event in the current stream."""
        return None if self._streams is None else self._streams.current().record_event()

    def copy(self, target: Tensor, source: Tensor, *, after: Event | None) -> Event | None:
        """Start to copy on the link's own stream; returns an event behind the copy."""
        if self._streams is None:
            target.copy_(source)
            return None
        self._stream.wait_event(after)
        with self._streams.use(self._stream):
            target.copy_(source, non_blocking=True)
            return self._streams.fence()

    def let_current_stream_wait(self, event: Event | None) -> None:
        """Let the current stream wait for an event of the link's stream."""
        if self._streams is not None:
            self._streams.current().wait_event(event)

    def _host_tensor(self, tensor: Tensor) -> Tensor:
        """Host memory for a tensor of this dtype and shape."""
        memory = host_memory(max(tensor.nbytes, 1), self._device)  # 0 bytes would have no stride
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _send(self, tensor: Tensor, host: Tensor, copied: Event | None, peer: int, tag: int) -> dist.Work:
        """In the thread: once the copy has ended, let gloo send. As an argument `tensor` lives until then."""
        if self._streams is not None and copied is not None:
            with self._streams.use(self._stream):  # else CUDA would set up the thread's default device, too
                copied.synchronize()
        return self.group.send([host], peer, tag)


class Sent(NamedTuple):
    """A message on its way out."""

    work: Future[dist.Work]

    def wait(self, timeout: timedelta) -> None:
        """Let the host wait until the message is received. Raises what gloo raises."""
        self.work.result().wait(timeout)


class Received(NamedTuple):
    """A message on its way in. free: the event behind which `tensor` may be written."""

    link: HostLink
    work: dist.Work
    host: Tensor
    tensor: Tensor
    free: Event | None

    def wait(self, timeout: timedelta) -> None:
        """Let the host wait for gloo, and the current stream for the copy. Raises what gloo raises."""
        self.work.wait(timeout)
        target = self.tensor.detach()  # it may be a leaf that requires grad
        copied = self.link.copy(target, self.host, after=self.free)
        self.link.let_current_stream_wait(copied)

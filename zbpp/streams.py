"""The streams of an accelerator: made here and nowhere else.

A call of a Pipeline runs on the caller's current stream. Beside it run

    stream       what runs there                             made by      priority
    messages     sends and receives, one stream per link     NCCL         high
    messages     copies of messages to host memory and back, `side`       normal
                 one stream per link, where gloo sends them
    reductions   gradients over replicas, shards and ties    NCCL, FSDP2  normal
    offload      activations to host memory and back         `side`       normal
    weights      offloaded weights to the device             `side`       normal
    gradients    those of offloaded weights to host memory   `side`       normal
    graphs       captures of CUDA graphs (replays run on the `side`       normal
                 caller's stream)

Messages are urgent: another rank waits for them. Streams wait for each other by events. Who waits:

    a message, a reduction, a copy   for the current stream, where it starts
    the current stream               for a message before the stage that needs it, and before a sent tensor
                                     is freed; for a copy before its memory is freed or read; for all
                                     reductions at the end of the step
    the host                         where it needs a number: shapes in a header, the norm at the gate of
                                     post-validation, which copies of a parameter have a gradient; for
                                     messages of gloo; and for offloaded weights at the end of the call

The caching allocator gives freed memory out again to the stream that it was allocated on. So memory that
another stream reads or writes may be freed once its own stream has waited for that stream's event.

`streams_of` is the only way to a device's streams. A test puts recorded ones in their place, by MAKERS.
NOT RUN ON A GPU YET.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from zbpp import devices


class Event(Protocol):
    """A place in a stream's work. As torch.Event."""

    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class Stream(Protocol):
    """Work that a device does in order. As torch.Stream."""

    def wait_event(self, event: Any, /) -> None: ...
    def wait_stream(self, stream: Any, /) -> None: ...
    def record_event(self) -> Any: ...
    def synchronize(self) -> None: ...


class Streams(Protocol):
    """The streams of one device."""

    def current(self) -> Stream:
        """The stream on which the calling thread starts work."""

    def side(self, what: str) -> Stream:
        """A new stream beside the computation. what: its name in the table above."""

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Within it the calling thread starts its work on this stream."""

    def mark(self) -> Event:
        """An event in the current stream whose time can be read."""

    def fence(self) -> Event:
        """An event in the current stream for which a thread may wait without a busy core."""

    def host_memory(self, nbytes: int) -> Tensor:
        """Bytes of host memory that the device copies from and to while the host goes on."""

    def moved(self, tensor: Tensor) -> Tensor:
        """The tensor on the device, copied by the current stream."""

    def synchronize(self) -> None:
        """Let the host wait for all streams of the device."""


class DeviceStreams:
    """The streams of one device of the accelerator, whichever device is the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        """See Streams."""
        return torch.accelerator.current_stream(self._device)

    def side(self, what: str) -> Stream:
        """See Streams."""
        return torch.Stream(self._device)

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        """See Streams. Not `with stream`, which two threads can't enter at a time."""
        with torch.accelerator.device_index(self._device.index):
            before = torch.accelerator.current_stream(self._device)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def mark(self) -> Event:
        """See Streams."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def fence(self) -> Event:
        """See Streams."""
        event = torch.Event(self._device, blocking=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def host_memory(self, nbytes: int) -> Tensor:
        """See Streams. Pinned; when freed, its allocator waits for the copies that use it."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def moved(self, tensor: Tensor) -> Tensor:
        """See Streams."""
        pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
        return pinned.to(self._device, non_blocking=True)

    def synchronize(self) -> None:
        """See Streams."""
        devices.synchronize(self._device)


MAKERS: dict[str, Callable[[torch.device], Streams]] = {}
"""{type of a device: makes other streams of such a device than its own}, for tests."""


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None for one without streams, such as the CPU."""
    make = MAKERS.get(device.type) or (DeviceStreams if devices.is_accelerator(device) else None)
    return None if make is None else make(devices.whole(device))


def host_memory(nbytes: int, device: torch.device) -> Tensor:
    """Uninitialised bytes of host memory, to be copied to a device and back; pinned if that is a GPU."""
    streams = streams_of(device)
    if streams is not None:
        return streams.host_memory(nbytes)
    # Not torch's memory: so live tensors are counted as on a GPU, where a tensor on the host is none.
    return torch.from_numpy(np.empty(nbytes, np.uint8))

"""Copies storages to host memory, and back, while the computation goes on.

A Copier has one copy stream: a copy starts when the previous copy has ended. On CUDA it is a CUDA stream, and
`wait` makes the current stream wait, not the host. On the CPU, where "host memory" is other memory of the
same machine, it is a thread, and `wait` blocks the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, UntypedStorage

from zbpp.streams import Event, Streams, streams_of


class Copy(Protocol):
    """Copies that have been started together."""

    def wait(self) -> None:
        """Wait until the copies have ended; on CUDA the current stream waits, and the host goes on."""

    def before_free(self) -> None:
        """To be called before memory on the device is freed that the copies may still read or write."""


Moves = list[tuple[UntypedStorage, Tensor]]
"""Pairs of a storage on the device and the host memory that it is copied to or from."""
Watch = Callable[[], Callable[[], None]]
"""Measures when copies run: called when the copies start, on the copy stream; returns a function that is
called when they end."""


class Copier(ABC):
    """Copies storages from `device` to host memory and back.

    Host memory that is given back is used again at once, since copies run one after the other. Sizes that a
    step did not use are freed at its end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, list[Tensor]] = {}  # by size
        self._used: set[int] = set()  # the sizes of this step

    def new_storage(self, nbytes: int) -> UntypedStorage:
        """Uninitialised memory of `nbytes` on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def host_memory(self, nbytes: int) -> Tensor:
        """Uninitialised memory of `nbytes` on the host."""
        self._used.add(nbytes)
        free = self._free.get(nbytes)
        return free.pop() if free else self._new_host_memory(nbytes)

    def give_back(self, host: Tensor) -> None:
        """Let host memory be used again. A copy that was started may still be reading it."""
        self._free.setdefault(host.nbytes, []).append(host)

    def end_step(self) -> None:
        """Free the memory of sizes that this step did not use: the shapes may have changed."""
        self._free = {size: self._free.get(size, []) for size in self._used}
        self._used.clear()

    @abstractmethod
    def _new_host_memory(self, nbytes: int) -> Tensor: ...

    @abstractmethod
    def out(self, moves: Moves, watch: Watch | None = None) -> Copy:
        """Start to copy from the device, after what the current stream has queued; empties `moves`."""

    @abstractmethod
    def back(self, moves: Moves, watch: Watch | None = None) -> Copy:
        """Start to copy to the device; empties `moves`."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies. No copy may follow."""


class _ThreadCopy(NamedTuple):
    future: Future[None]

    def wait(self) -> None:
        self.future.result()

    def before_free(self) -> None:
        # The thread holds the storages itself. Waiting could last for ever: Python's garbage collector may
        # free a saved tensor in that very thread.
        pass


class ThreadCopier(Copier):
    """A Copier on the CPU, whose copy stream is a thread."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._thread = ThreadPoolExecutor(1, "zbpp-offload")

    def _new_host_memory(self, nbytes: int) -> Tensor:
        # Not torch's memory: so live tensors are counted as on a GPU, where a tensor that is away is none.
        return torch.from_numpy(np.empty(nbytes, np.uint8))

    def out(self, moves: Moves, watch: Watch | None = None) -> Copy:
        return _ThreadCopy(self._thread.submit(_copy, moves, watch, is_out=True))

    def back(self, moves: Moves, watch: Watch | None = None) -> Copy:
        return _ThreadCopy(self._thread.submit(_copy, moves, watch, is_out=False))

    def close(self) -> None:
        self._thread.shutdown()


class _StreamCopy(NamedTuple):
    streams: Streams
    ended: Event

    def wait(self) -> None:
        self.streams.current().wait_event(self.ended)

    def before_free(self) -> None:
        self.wait()


class StreamCopier(Copier):
    """Copies between a GPU and pinned memory on a CUDA stream of its own.

    The caller allocates and frees storages on the current stream only, and makes that stream wait for a copy
    before it frees a storage that the copy reads or writes. So record_stream is not needed: the allocator may
    reuse memory at the point where the program frees it, however far the host runs ahead.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        super().__init__(device)
        self._streams, self._stream = streams, streams.side("offload")

    def _new_host_memory(self, nbytes: int) -> Tensor:
        return self._streams.host_memory(nbytes)

    def out(self, moves: Moves, watch: Watch | None = None) -> Copy:
        return self._start(moves, watch, is_out=True)

    def back(self, moves: Moves, watch: Watch | None = None) -> Copy:
        return self._start(moves, watch, is_out=False)

    def _start(self, moves: Moves, watch: Watch | None, *, is_out: bool) -> Copy:
        # A copy out reads what the current stream has written. A copy back writes to memory whose previous
        # content the current stream may still read.
        self._stream.wait_stream(self._streams.current())
        with self._streams.use(self._stream):
            _copy(moves, watch, is_out=is_out)
            return _StreamCopy(self._streams, self._stream.record_event())

    def close(self) -> None:
        self._stream.synchronize()


def copier_for(device: torch.device) -> Copier:
    """The Copier between a device and host memory."""
    streams = streams_of(device)
    return ThreadCopier(device) if streams is None else StreamCopier(device, streams)


def bytes_of(storage: UntypedStorage) -> Tensor:
    """A tensor of uint8 over the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(moves: Moves, watch: Watch | None, *, is_out: bool) -> None:
    """Copy one storage after another on the current stream, or in the current thread."""
    ended = None if watch is None else watch()
    try:
        for storage, host in moves:
            target, source = (host, bytes_of(storage)) if is_out else (bytes_of(storage), host)
            target.copy_(source, non_blocking=True)
    finally:
        moves.clear()  # so that a storage is freed where the caller drops it, as planned
    if ended is not None:
        ended()

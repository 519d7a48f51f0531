"""Copies storages to host memory, and back, while the computation goes on.

A Copier has one copy stream: a copy starts when the previous copy has ended, and `wait` makes the current
stream wait for it, not the host. On the CPU, where "host memory" is other memory of the same machine, a copy
has ended when `out` or `back` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from zbpp.streams import Event, Streams, host_memory, streams_of

Moves = list[tuple[UntypedStorage, Tensor]]
"""Pairs of a storage on the device and the host memory that it is copied to or from."""
Watch = Callable[[], Callable[[], None]]
"""Measures when copies run: called when the copies start, on the copy stream; returns a function that is
called when they end."""


class Copy(NamedTuple):
    """Copies that have been started together. ended: behind them; None: they have ended."""

    streams: Streams | None
    ended: Event | None

    def wait(self) -> None:
        """Let the current stream wait until the copies have ended.

        To be called before memory on the device is used or freed that the copies read or write.
        """
        if self.streams is not None:
            self.streams.current().wait_event(self.ended)


class Copier:
    """Copies storages from `device` to host memory and back.

    Host memory that is given back is used again at once, since copies run one after the other. Sizes that a
    step did not use are freed at its end.

    On a GPU the caller allocates and frees storages on the current stream only, and makes that stream wait
    for a copy before it frees a storage that the copy reads or writes. So record_stream is not needed: the
    allocator may reuse memory at the point where the program frees it, however far the host runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = streams_of(device)
        self._stream = None if self._streams is None else self._streams.side("offload")
        self._free: dict[int, list[Tensor]] = {}  # by size
        self._used: set[int] = set()  # the sizes of this step

    def new_storage(self, nbytes: int) -> UntypedStorage:
        """Uninitialised memory of `nbytes` on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def host_memory(self, nbytes: int) -> Tensor:
        """Uninitialised memory of `nbytes` on the host."""
        self._used.add(nbytes)
        free = self._free.get(nbytes)
        return free.pop() if free else host_memory(nbytes, self.device)

    def give_back(self, host: Tensor) -> None:
        """Let host memory be used again. A copy that was started may still be reading it."""
        self._free.setdefault(host.nbytes, []).append(host)

    def end_step(self) -> None:
        """Free the memory of sizes that this step did not use: the shapes may have changed."""
        self._free = {size: self._free.get(size, []) for size in self._used}
        self._used.clear()

    def out(self, moves: Moves, watch: Watch | None = None) -> Copy:
        """Start to copy from the device, after what the current stream has queued; empties `moves`."""
        return self._start(moves, watch, is_out=True)

    def back(self, moves: Moves, watch: Watch | None = None) -> Copy:
        """Start to copy to the device; empties `moves`."""
        return self._start(moves, watch, is_out=False)

    def close(self) -> None:
        """Wait for all copies. No copy may follow."""
        if self._stream is not None:
            self._stream.synchronize()

    def _start(self, moves: Moves, watch: Watch | None, *, is_out: bool) -> Copy:
        if self._streams is None or self._stream is None:
            _copy(moves, watch, is_out=is_out)
            return Copy(None, None)
        # A copy out reads what the current stream has written. A copy back writes to memory whose previous
        # content the current stream may still read.
        self._stream.wait_stream(self._streams.current())
        with self._streams.use(self._stream):
            _copy(moves, watch, is_out=is_out)
            return Copy(self._streams, self._stream.record_event())


def bytes_of(storage: UntypedStorage) -> Tensor:
    """A tensor of uint8 over the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(moves: Moves, watch: Watch | None, *, is_out: bool) -> None:
    """Copy one storage after another on the current stream."""
    ended = None if watch is None else watch()
    for storage, host in moves:
        target, source = (host, bytes_of(storage)) if is_out else (bytes_of(storage), host)
        target.copy_(source, non_blocking=True)
    moves.clear()  # so that a storage is freed where the caller drops it, as planned
    if ended is not None:
        ended()

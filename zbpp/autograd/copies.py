"""Copies storages to a place outside device memory, and back, while the computation goes on.

A Copier has a pool of SPACES, which are parts of host memory or of a file, and one copy stream: a copy starts
when the previous copy has ended. So the pool may give a space out again as soon as the copy that reads it has
been started. On CUDA the copy stream is a CUDA stream, and `wait` makes the current stream wait, not the
host. On the CPU the copy stream is a thread, and `wait` blocks the caller.

    HostCopier    to host memory: pinned if the device is a GPU
    FileCopier    to a file; from the CPU only
"""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage

from zbpp.autograd.host_memory import refuse_more_than_available
from zbpp.streams import Event, Streams, streams_of


class OffloadError(RuntimeError):
    """There is no memory outside the device for storages that are to leave, or a copy failed."""


class Copy(Protocol):
    """Copies that have been started together."""

    def wait(self) -> None:
        """Wait until the copies have ended; on CUDA the current stream waits, and the host goes on."""


Moves = list[tuple[UntypedStorage, Any]]  # (storage, its space)
Watch = Callable[[], Callable[[], None]]
"""Measures when copies run: called when the copies start, on the copy stream; returns a function that is
called when they end."""


class Copier(ABC):
    """Copies storages from `device` to spaces and back.

    num_spaces, total_bytes: the number and the size of all spaces, in use or free; while shapes stay, they do
    not grow after the first steps. used_bytes: the bytes of the storages in spaces. most_bytes: the limit of
    used_bytes; only `has_room` looks at it.

    A space is up to an eighth larger than the storage it was made for, so that storages of nearly the same
    size fit, too. `trim`, called after each step, frees the spaces that were not used in the last two steps:
    with shapes that change, a pool holds at most what three steps need.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_spaces = device, 0
        self.total_bytes = self.used_bytes = 0
        self.most_bytes = math.inf
        self._free: dict[int, list[Any]] = {}  # size -> the free spaces of this size
        self._least_free: dict[int, int] = {}  # size -> how many were free all the time since `trim`
        self._spare: dict[int, int] = {}  # size -> how many were free all the time in the previous step

    def has_room(self, nbytes: int) -> bool:
        """Whether used_bytes plus `nbytes` stays within most_bytes."""
        return self.used_bytes + nbytes <= self.most_bytes

    def space(self, nbytes: int) -> Any:
        """A space of at least `nbytes`: a free one, or a new one. Raises OffloadError if none can be made."""
        size = _space_size(nbytes)
        free = self._free.setdefault(size, [])
        if free:
            space = free.pop()
        else:
            space = self._new_space(size)
        self._least_free[size] = min(self._least_free.get(size, 0), len(free))
        self.used_bytes += nbytes
        return space

    def _new_space(self, size: int) -> Any:
        try:
            made = self._make_space(size)
        except (RuntimeError, MemoryError, OSError) as error:
            raise OffloadError(
                f"no room for {size} more bytes of offloaded activations in {self._where}, which holds "
                f"{self.total_bytes} bytes already: offload fewer bytes (memory.offload, "
                f"ActivationOffload(gib=...)), or to another place (memory.offload_to, to=...): {error}"
            ) from error
        self.num_spaces += 1
        self.total_bytes += size
        return made

    def give_back(self, space: Any, nbytes: int) -> None:
        """Return a space to the pool. A copy that reads the space may still be running."""
        self.used_bytes -= nbytes
        self._free.setdefault(_space_size(nbytes), []).append(space)

    def trim(self) -> None:
        """End a step: free the spaces that were not used in this step, nor in the previous one."""
        spare = {size: self._least_free.get(size, len(free)) for size, free in self._free.items()}
        unneeded = {size: min(number, self._spare.get(size, 0)) for size, number in spare.items()}
        if any(unneeded.values()):
            self._give_up(unneeded)
        self._spare = {size: number - unneeded[size] for size, number in spare.items()}
        self._least_free = {size: len(free) for size, free in self._free.items()}

    def clear(self) -> None:
        """Free all spaces that are not in use."""
        self._give_up({size: len(free) for size, free in self._free.items()})
        self._spare.clear()
        self._least_free.clear()

    def _give_up(self, numbers: dict[int, int]) -> None:
        """Free unused spaces; numbers: {size: how many spaces of this size}."""
        for size, number in numbers.items():
            self.num_spaces -= number
            self.total_bytes -= size * number
            del self._free[size][:number]
            if not self._free[size]:
                del self._free[size]

    def new_storage(self, nbytes: int) -> UntypedStorage:
        """Uninitialised memory of `nbytes` on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    @abstractmethod
    def out(self, moves: Moves, watch: Watch | None = None) -> Copy:
        """Start to copy storages to spaces, after what the current stream has queued; empties `moves`."""

    @abstractmethod
    def back(self, moves: Moves, watch: Watch | None = None) -> Copy:
        """Start to copy spaces to storages; empties `moves`."""

    def close(self) -> None:
        """Free all spaces. No copy may follow."""
        self.clear()

    @property
    @abstractmethod
    def _where(self) -> str: ...

    @abstractmethod
    def _make_space(self, nbytes: int) -> Any: ...


_here = threading.local()  # in a copier's thread it has the attribute `copies`


class _ThreadCopy(NamedTuple):
    future: Future[None]

    def wait(self) -> None:
        if hasattr(_here, "copies"):
            # Garbage collection frees a saved tensor in the copying thread itself: to wait would block it for
            # ever. Not to wait is safe: the thread's copies run in order and hold their storages.
            return
        try:
            self.future.result()
        except (RuntimeError, MemoryError, OSError) as error:
            raise OffloadError(f"copying offloaded activations failed: {error}") from error


class ThreadCopier(Copier):
    """A Copier whose copy stream is a thread."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._thread = ThreadPoolExecutor(1, "zbpp-offload", lambda: setattr(_here, "copies", True))

    def out(self, moves: Moves, watch: Watch | None = None) -> Copy:
        return _ThreadCopy(self._thread.submit(self._copy, self._write, moves, watch))

    def back(self, moves: Moves, watch: Watch | None = None) -> Copy:
        return _ThreadCopy(self._thread.submit(self._copy, self._read, moves, watch))

    def _copy(self, copy: Callable[[UntypedStorage, Any], None], moves: Moves, watch: Watch | None) -> None:
        """Runs in the thread: copy one storage after another."""
        ended = None if watch is None else watch()
        try:
            for number in range(len(moves)):
                copy(*moves[number])
        finally:
            # The thread keeps no reference: storages are freed where the caller drops them, as planned.
            moves.clear()
        if ended is not None:
            ended()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        super().close()

    @abstractmethod
    def _write(self, storage: UntypedStorage, space: Any) -> None: ...

    @abstractmethod
    def _read(self, storage: UntypedStorage, space: Any) -> None: ...


class HostCopier(ThreadCopier):
    _where = "host memory"

    def _make_space(self, nbytes: int) -> Tensor:
        refuse_more_than_available(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def _write(self, storage: UntypedStorage, space: Any) -> None:
        space[: storage.nbytes()].copy_(bytes_of(storage))

    def _read(self, storage: UntypedStorage, space: Any) -> None:
        bytes_of(storage).copy_(space[: storage.nbytes()])


class FileCopier(ThreadCopier):
    """Copies to an unnamed file in `folder`: the system deletes it when the process ends or is killed."""

    def __init__(self, device: torch.device, folder: str | Path) -> None:
        super().__init__(device)
        self._folder = folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # closed in close()
        except OSError as error:
            raise OffloadError(f"activations can't be offloaded to {folder}: {error}") from error

    def close(self) -> None:
        super().close()
        self._file.close()

    @property
    def _where(self) -> str:
        return f"a file in {self._folder}"

    def _give_up(self, numbers: dict[int, int]) -> None:
        """Free all spaces if none is in use, else no space: a file can be shortened only at its end."""
        if not self.used_bytes and not self._file.closed:
            super()._give_up({size: len(free) for size, free in self._free.items()})
            self._file.truncate(0)

    def _make_space(self, nbytes: int) -> int:
        start = self.total_bytes
        os.posix_fallocate(self._file.fileno(), start, nbytes)
        return start

    def _write(self, storage: UntypedStorage, space: Any) -> None:
        left = _memory_of(storage)
        while left:
            written = os.pwrite(self._file.fileno(), left, space)
            left, space = left[written:], space + written

    def _read(self, storage: UntypedStorage, space: Any) -> None:
        left = _memory_of(storage)
        while left:
            read = os.preadv(self._file.fileno(), [left], space)
            if not read:
                raise OSError(f"the file in {self._folder} was cut off")
            left, space = left[read:], space + read


class _StreamCopy(NamedTuple):
    streams: Streams
    ended: Event

    def wait(self) -> None:
        self.streams.current().wait_event(self.ended)


class StreamCopier(Copier):
    """Copies between a GPU and pinned memory on a CUDA stream of its own. NOT RUN ON A GPU YET.

    The caller allocates and frees storages on the current stream only, and makes that stream wait for a copy
    before it frees a storage that the copy reads or writes. So record_stream is not needed: the allocator may
    reuse memory at the point where the program frees it, however far the host runs ahead.
    """

    _where = "pinned host memory"

    def __init__(self, device: torch.device, streams: Streams) -> None:
        super().__init__(device)
        self._streams, self._stream = streams, streams.side("offload")

    def out(self, moves: Moves, watch: Watch | None = None) -> Copy:
        pairs = [(space[: storage.nbytes()], bytes_of(storage)) for storage, space in moves]
        return self._start(pairs, moves, watch)

    def back(self, moves: Moves, watch: Watch | None = None) -> Copy:
        pairs = [(bytes_of(storage), space[: storage.nbytes()]) for storage, space in moves]
        return self._start(pairs, moves, watch)

    def _start(self, pairs: Sequence[tuple[Tensor, Tensor]], moves: Moves, watch: Watch | None) -> Copy:
        # A copy out reads what the current stream has written. A copy back writes to memory whose previous
        # content the current stream may still read.
        self._stream.wait_stream(self._streams.current())
        with self._streams.use(self._stream):
            ended = None if watch is None else watch()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            if ended is not None:
                ended()
            copy = _StreamCopy(self._streams, self._stream.record_event())
        moves.clear()
        return copy

    def close(self) -> None:
        self._stream.synchronize()
        super().close()

    def _make_space(self, nbytes: int) -> Tensor:
        refuse_more_than_available(nbytes)
        return self._streams.host_memory(nbytes)


def copier_for(device: torch.device, to: str | Path = "host") -> Copier:
    """The Copier from a device to host memory ("host"), or to a file in the folder `to`.

    Raises OffloadError if the folder can't be written to.
    """
    if to == "host":
        streams = streams_of(device)
        return HostCopier(device) if streams is None else StreamCopier(device, streams)
    if device.type != "cpu":
        raise OffloadError(
            f'activations on {device} can be offloaded to host memory only, not to {to}: write "host"'
        )
    return FileCopier(device, to)


def _space_size(nbytes: int) -> int:
    """`nbytes` rounded up; there are eight sizes from one power of two to the next."""
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


def _memory_of(storage: UntypedStorage) -> memoryview:
    """The storage's memory on the CPU. Tensor.numpy() would keep the storage from being resized."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def bytes_of(storage: UntypedStorage) -> Tensor:
    """A tensor of uint8 over the whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""Copies of storages to a place outside device memory, and back, beside the computation.

A Copier has pools of SPACES, parts of host memory or of a file, and one stream of copies: a copy starts when
the copy before it has ended. So a space may be given out again as soon as the copy that reads it has been
started. On CUDA the stream is a CUDA stream, and `wait` makes the current stream wait, not the host. On the
CPU a thread stands for the stream, and the caller waits.

    HostCopier    to host memory: pinned if the device is a GPU
    FileCopier    to a file; from the CPU only
"""

from __future__ import annotations

import ctypes
import math
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, UntypedStorage

from zbpp.autograd.host_memory import refuse_more_than_available


class OffloadError(RuntimeError):
    """There is no room outside the device, or a copy failed."""


class Copy(Protocol):
    """Copies that have been started."""

    def wait(self) -> None:
        """Until this returns, or on CUDA for the current stream, the copies may still read and write."""


Moves = list[tuple[UntypedStorage, Any]]  # (storage, its space)
Watch = Callable[[], Callable[[], None]]
"""Notes when copies run: called when they start, where they run; its result is called when they end."""


class Copier(ABC):
    """Copies to spaces outside `device` and back.

    num_spaces, total_bytes: of all spaces, in use or free; they do not grow in the steady state.
    used_bytes: of the spaces in use. most_bytes: the most that may be in use, for those who ask `has_room`.

    A space is up to an eighth larger than what it was made for, so that one of nearly the same size fits,
    too. `trim`, called after each step, gives up the spaces that the last two steps had no use for: with
    shapes that change, a pool holds what three steps need at most.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.num_spaces = device, 0
        self.total_bytes = self.used_bytes = 0
        self.most_bytes = math.inf
        self._free: dict[int, list[Any]] = {}  # by size
        self._least_free: dict[int, int] = {}  # how many of a size were free all the time since `trim`
        self._spare: dict[int, int] = {}  # the same of the step before

    def has_room(self, nbytes: int) -> bool:
        """Whether so much more may leave."""
        return self.used_bytes + nbytes <= self.most_bytes

    def space(self, nbytes: int) -> Any:
        """A space of at least this size from the pool. Raises OffloadError if there is none and no room."""
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
                f"no room for {size} more bytes of offloaded activations in {self._where}, which has "
                f"{self.total_bytes}: let less leave (memory.offload, ActivationOffload(gib=...)), or let it "
                f"go elsewhere (memory.offload_to, to=...): {error}"
            ) from error
        self.num_spaces += 1
        self.total_bytes += size
        return made

    def give_back(self, space: Any, nbytes: int) -> None:
        """Return a space to the pool; the copy that reads it may be under way."""
        self.used_bytes -= nbytes
        self._free.setdefault(_space_size(nbytes), []).append(space)

    def trim(self) -> None:
        """End a step: give up the spaces that were free all the time in this step and in the one before."""
        spare = {size: self._least_free.get(size, len(free)) for size, free in self._free.items()}
        unneeded = {size: min(number, self._spare.get(size, 0)) for size, number in spare.items()}
        if any(unneeded.values()):
            self._give_up(unneeded)
        self._spare = {size: number - unneeded[size] for size, number in spare.items()}
        self._least_free = {size: len(free) for size, free in self._free.items()}

    def clear(self) -> None:
        """Give up the free spaces."""
        self._give_up({size: len(free) for size, free in self._free.items()})
        self._spare.clear()
        self._least_free.clear()

    def _give_up(self, numbers: dict[int, int]) -> None:
        """Give up so many free spaces of each size."""
        for size, number in numbers.items():
            self.num_spaces -= number
            self.total_bytes -= size * number
            del self._free[size][:number]
            if not self._free[size]:
                del self._free[size]

    def new_storage(self, nbytes: int) -> UntypedStorage:
        """Uninitialised memory on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    @abstractmethod
    def out(self, moves: Moves, watch: Watch | None = None) -> Copy:
        """Start to copy storages to spaces, once the current stream has written them; empties the list."""

    @abstractmethod
    def back(self, moves: Moves, watch: Watch | None = None) -> Copy:
        """Start to copy spaces to storages; empties the list."""

    def close(self) -> None:
        """Give up all spaces; no copy follows."""
        self.clear()

    @property
    @abstractmethod
    def _where(self) -> str: ...

    @abstractmethod
    def _make_space(self, nbytes: int) -> Any: ...


class _ThreadCopy(NamedTuple):
    future: Future[None]

    def wait(self) -> None:
        try:
            self.future.result()
        except (RuntimeError, MemoryError, OSError) as error:
            raise OffloadError(f"copying offloaded activations failed: {error}") from error


class ThreadCopier(Copier):
    """Copies one after another, in a thread."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._thread = ThreadPoolExecutor(1, "zbpp-offload")

    def out(self, moves: Moves, watch: Watch | None = None) -> Copy:
        return _ThreadCopy(self._thread.submit(self._copy, self._write, moves, watch))

    def back(self, moves: Moves, watch: Watch | None = None) -> Copy:
        return _ThreadCopy(self._thread.submit(self._copy, self._read, moves, watch))

    def _copy(self, copy: Callable[[UntypedStorage, Any], None], moves: Moves, watch: Watch | None) -> None:
        """In the thread: copy one after another."""
        ended = None if watch is None else watch()
        try:
            for number in range(len(moves)):
                copy(*moves[number])
        finally:
            # The caller frees what it dropped, not this thread: so memory is freed where the plan says.
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
    """Copies to a file without a name in `folder`: it is gone when the process ends, however it ends."""

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
        """Give up all spaces, if any: a file can be cut off at its end only."""
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


class _CudaCopy(NamedTuple):
    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class _CudaHostCopier(Copier):
    """Copies between a GPU and pinned memory on a stream of its own. NOT RUN ON A GPU YET.

    A storage is allocated and freed on the current stream alone. So whoever frees one that a copy reads or
    writes waits for the copy first, and the allocator needs no record_stream: memory can be used again where
    the program frees it, however far the host runs ahead.
    """

    _where = "pinned host memory"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def out(self, moves: Moves, watch: Watch | None = None) -> Copy:
        pairs = [(space[: storage.nbytes()], bytes_of(storage)) for storage, space in moves]
        return self._start(pairs, moves, watch)

    def back(self, moves: Moves, watch: Watch | None = None) -> Copy:
        pairs = [(bytes_of(storage), space[: storage.nbytes()]) for storage, space in moves]
        return self._start(pairs, moves, watch)

    def _start(self, pairs: Sequence[tuple[Tensor, Tensor]], moves: Moves, watch: Watch | None) -> Copy:
        # Out: the current stream wrote the storage. Back: it may still read what lay in this memory before.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            ended = None if watch is None else watch()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            if ended is not None:
                ended()
            copy = _CudaCopy(self._stream.record_event())
        moves.clear()
        return copy

    def close(self) -> None:
        self._stream.synchronize()
        super().close()

    def _make_space(self, nbytes: int) -> Tensor:
        refuse_more_than_available(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def copier_for(device: torch.device, to: str | Path = "host") -> Copier:
    """The Copier from a device to host memory ("host"), or to a file in the folder `to`.

    Raises OffloadError if the folder can't be written to.
    """
    if to == "host":
        return _CudaHostCopier(device) if device.type == "cuda" else HostCopier(device)
    if device.type != "cpu":
        raise OffloadError(f'activations leave {device} for host memory only, not for {to}: write "host"')
    return FileCopier(device, to)


def _space_size(nbytes: int) -> int:
    """The size rounded up to one of eight sizes between two powers of two."""
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


def _memory_of(storage: UntypedStorage) -> memoryview:
    """The storage's memory on the CPU. (After Tensor.numpy() a storage could never change its size.)"""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def bytes_of(storage: UntypedStorage) -> Tensor:
    """The bytes of a storage as a tensor over it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

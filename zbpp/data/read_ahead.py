"""A thread that reads the next batches and moves them to the device while the present one is trained on.

thread    read 5 -> pin -> copy on a stream of its own -> queue      (at most `ahead` wait there)
training  step 3    step 4    waits for the copy of batch 5, on the device    step 5
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zbpp.streams import Event as StreamEvent
from zbpp.streams import Stream, Streams, streams_of


class BatchError(RuntimeError):
    """A batch could not be read; its number is in the message, its cause in `__cause__`."""


class _Read(NamedTuple):
    """What the thread hands over: a batch or an error. copied: an event after the copy to a CUDA device."""

    number: int
    batch: Any
    error: BaseException | None = None
    copied: StreamEvent | None = None


class ReadAhead:
    """Batches by number, each as `read(number)` gives it, moved to `device`.

    read: a thread calls it with ascending numbers. It must not draw from global random states, since training
    draws from them at the same time. The thread starts when a batch is first asked for, and starts anew if a
    batch is asked for that is not the next one; it ends with `close`. `batch` raises BatchError.
    """

    def __init__(self, read: Callable[[int], Any], ahead: int, device: torch.device) -> None:
        self._read, self._ahead, self._device = read, ahead, device
        self._streams = streams_of(device)
        self._thread: _Thread | None = None
        self._present = _Read(-1, None)

    def batch(self, number: int) -> Any:
        """The batch of this number; the latest one is not read again."""
        if number == self._present.number:
            return self._present.batch
        if self._thread is None or number != self._present.number + 1:
            self.close()
            self._thread = _Thread(self._read, number, self._ahead, self._device, self._streams)
        found = self._thread.queue.get()
        if found.error is not None:
            self.close()
            error = found.error
            raise BatchError(
                f"the batch of step {found.number} can't be read: {type(error).__name__}: {error}"
            ) from error
        if found.copied is not None and self._streams is not None:
            _hand_over(found.batch, found.copied, self._streams)
        self._present = found
        return found.batch

    def close(self) -> None:
        """End the thread; batches that were read ahead are dropped."""
        if self._thread is not None:
            self._thread.end()
        self._thread, self._present = None, _Read(-1, None)


def check_thread_may_read(source: object) -> None:
    """Raises ValueError for a source with `draws_global_random`, as a user's own Dataset is."""
    if getattr(source, "draws_global_random", False):
        raise ValueError(
            "read_ahead is for zbpp's own data: a user's Dataset may draw torch's random numbers, and a "
            "thread would disturb those of training; write read_ahead=0, and give a DataLoader with "
            "num_workers=1 or more, whose processes read ahead"
        )


class _Thread:
    def __init__(
        self,
        read: Callable[[int], Any],
        first: int,
        ahead: int,
        device: torch.device,
        streams: Streams | None,
    ) -> None:
        self.queue: Queue[_Read] = Queue(maxsize=ahead)
        self._ended = Event()
        self._read, self._device, self._streams = read, device, streams
        # A daemon: a process that ends by an error must not wait for it.
        self._thread = Thread(target=self._work, args=(first,), name="zbpp-read-ahead", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self, first: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # for this thread; each has a device of its own
        stream = None if self._streams is None else self._streams.side("batches")
        for number in count(first):
            try:
                found = self._moved(number, stream)
            except BaseException as error:  # handed over: training raises it
                found = _Read(number, None, error)
            if not self._handed_over(found) or found.error is not None:
                return

    def _moved(self, number: int, stream: Stream | None) -> _Read:
        batch, streams = self._read(number), self._streams
        if stream is None or streams is None:
            return _Read(number, batch)
        with streams.use(stream):
            batch = tree_map(lambda each: streams.moved(each) if isinstance(each, Tensor) else each, batch)
            return _Read(number, batch, copied=stream.record_event())

    def _handed_over(self, found: _Read) -> bool:
        """Wait for room in the queue; False if the end came first."""
        while not self._ended.is_set():
            try:
                self.queue.put(found, timeout=0.1)
            except Full:
                continue
            return True
        return False


def _hand_over(batch: Any, copied: StreamEvent, streams: Streams) -> None:
    """Let the current stream wait for the copy, and keep the memory until that stream has used it."""
    stream = streams.current()
    stream.wait_event(copied)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            streams.keep(leaf, stream)

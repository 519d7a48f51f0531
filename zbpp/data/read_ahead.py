"""A thread that reads the next batches and moves them to the device while the present one is trained on.

thread    read 5 -> pin -> copy on a stream of its own      (at most `ahead` batches wait)
training  step 3    step 4    waits for the copy of batch 5, on the device    step 5
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zbpp.streams import Event, Streams, streams_of


class BatchError(RuntimeError):
    """A batch could not be read; its number is in the message, its cause in `__cause__`."""


class ReadAhead:
    """Batches by number, each as `read(number)` gives it, moved to `device`.

    read: a thread calls it with ascending numbers. It must not draw from global random states, since training
    draws from them at the same time. The thread starts when a batch is first asked for, and starts anew if a
    batch is asked for that is not the next one; it ends with `close`. `batch` raises BatchError.
    """

    def __init__(self, read: Callable[[int], Any], ahead: int, device: torch.device) -> None:
        self._read, self._ahead, self._device = read, ahead, device
        self._streams = streams_of(device)
        self._stream = None if self._streams is None else self._streams.side("batches")
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[tuple[Any, Event | None]]] = deque()
        self._number, self._present = -1, None

    def batch(self, number: int) -> Any:
        """The batch of this number; the latest one is not read again."""
        if number == self._number:
            return self._present
        if number != self._number + 1:
            self.close()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "zbpp-read-ahead")
        for later in range(number + len(self._waiting), number + self._ahead + 1):
            self._waiting.append(self._thread.submit(self._moved, later))
        try:
            batch, copied = self._waiting.popleft().result()
        except Exception as error:
            self.close()
            raise BatchError(
                f"the batch of step {number} can't be read: {type(error).__name__}: {error}"
            ) from error
        if copied is not None and self._streams is not None:
            _hand_over(batch, copied, self._streams)
        self._number, self._present = number, batch
        return batch

    def close(self) -> None:
        """End the thread; batches that were read ahead are dropped."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = None
        self._waiting.clear()
        self._number, self._present = -1, None

    def _moved(self, number: int) -> tuple[Any, Event | None]:
        """In the thread: the batch, and an event after its copy to a CUDA device."""
        batch, streams = self._read(number), self._streams
        if streams is None or self._stream is None:
            return batch, None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has a device of its own
        with streams.use(self._stream):
            batch = tree_map(lambda each: streams.moved(each) if isinstance(each, Tensor) else each, batch)
            return batch, self._stream.record_event()


def check_thread_may_read(source: object) -> None:
    """Raises ValueError for a source with `draws_global_random`, as a user's own Dataset is."""
    if getattr(source, "draws_global_random", False):
        raise ValueError(
            "read_ahead is for zbpp's own data: a user's Dataset may draw torch's random numbers, and a "
            "thread would disturb those of training; write read_ahead=0, and give a DataLoader with "
            "num_workers=1 or more, whose processes read ahead"
        )


def _hand_over(batch: Any, copied: Event, streams: Streams) -> None:
    """Let the current stream wait for the copy, and keep the memory until that stream has used it."""
    stream = streams.current()
    stream.wait_event(copied)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            streams.keep(leaf, stream)

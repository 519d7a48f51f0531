"""What the process that started a job does with signals: it passes them on to its ranks, once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from threading import current_thread, main_thread
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

_ENDING = (signal.SIGTERM, signal.SIGINT)
_SAME = 0.5  # s: a signal that comes twice within this time is one


class Passed:
    """The signals that came. name: of the first one; None before it."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._ended_at: float | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the ranks. Raises SignalException for a second one of those that end a job."""
        received, now = signal.Signals(number), time.monotonic()
        if received in _ENDING:
            if self._ended_at is not None and now - self._ended_at > _SAME:
                raise SignalException(f"a second {received.name}", sigval=received)
            self._ended_at = self._ended_at or now
        self.name = self.name or received.name
        for child in active_children():
            with suppress(ProcessLookupError):
                os.kill(child.pid or 0, number)


@contextmanager
def passing_signals() -> Iterator[Passed]:
    """SIGTERM, SIGINT and SIGUSR1 that come inside go to all processes that this one started."""
    passed = Passed()
    if current_thread() is not main_thread():
        yield passed
        return
    before = {each: signal.signal(each, passed.take) for each in (*_ENDING, signal.SIGUSR1)}
    try:
        yield passed
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

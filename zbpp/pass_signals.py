"""What the process that started a job does with signals: it passes them on to its ranks, once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import active_children
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException

_ENDING = (signal.SIGTERM, signal.SIGINT)
_SAME = 0.5  # s: a signal that comes twice within this time is one


class Passed:
    """The signals that came. name: of the first one; None before it.

    begun: a file that exists when a rank has begun. A signal that comes before there is any rank ends the job
    at once, since nobody would hear of it later.
    """

    def __init__(self, begun: Path) -> None:
        self.name: str | None = None
        self._begun = begun
        self._ended_at: float | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the ranks. Raises SignalException for one that ends the job at once."""
        received, now = signal.Signals(number), time.monotonic()
        if received in _ENDING:
            if self._ended_at is not None and now - self._ended_at > _SAME:
                raise SignalException(f"a second {received.name}", sigval=received)
            self._ended_at = self._ended_at or now
        self.name = self.name or received.name
        ranks = active_children()
        if not ranks and not self._begun.exists():
            raise SignalException(f"{received.name} before any rank", sigval=received)
        for child in ranks:
            with suppress(ProcessLookupError):
                os.kill(child.pid or 0, number)


@contextmanager
def passing_signals(begun: Path) -> Iterator[Passed]:
    """SIGTERM, SIGINT and SIGUSR1 that come inside go to all processes that this one started. See Passed."""
    passed = Passed(begun)
    if current_thread() is not main_thread():
        yield passed
        return
    before = {each: signal.signal(each, passed.take) for each in (*_ENDING, signal.SIGUSR1)}
    try:
        yield passed
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

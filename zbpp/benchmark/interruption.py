"""SIGTERM, SIGINT and SIGHUP become an exception.

So a check that is ended can end the processes that it started, and keep what it has found.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal came; the message is its name."""


class Interruption:
    """The first signal that came. Later ones are ignored: the check ends within seconds of the first."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._is_held = False

    @property
    def exit_status(self) -> int:
        """As a shell has it: 143 for SIGTERM, 130 for SIGINT; 0 if no signal came."""
        return 0 if self.signal is None else 128 + self.signal

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal that comes inside raises Interrupted at the end, so that a started process is known."""
        known, self._is_held = self.signal, True
        try:
            yield
        finally:
            self._is_held = False
        if self.signal is not known:
            raise Interrupted(str(self))

    def take(self, number: int, frame: FrameType | None) -> None:
        """Raises Interrupted for the first signal."""
        if self.signal is None:
            self.signal = signal.Signals(number)
            if not self._is_held:
                raise Interrupted(str(self))

    def __str__(self) -> str:
        return "" if self.signal is None else self.signal.name


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Inside, the first ending signal raises Interrupted in the main thread."""
    taken = Interruption()
    if current_thread() is not main_thread():
        yield taken
        return
    before = {each: signal.signal(each, taken.take) for each in _ENDING}
    try:
        yield taken
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

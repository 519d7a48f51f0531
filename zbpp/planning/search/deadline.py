"""How much of the search's time is left."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

_WATCH_INTERVAL = 0.1  # seconds


class Deadline:
    """`seconds` from now. `over` is cheap enough to ask in a loop, and calls `watch` ten times a second."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._start, self._next = seconds, monotonic(), _WATCH_INTERVAL
        self.watch: Callable[[], None] | None = None

    @property
    def over(self) -> bool:
        spent = monotonic() - self._start
        if self.watch and spent >= self._next:
            self._next = spent + _WATCH_INTERVAL
            self.watch()
        return spent >= self.seconds

    @property
    def fraction(self) -> float:
        """The share of the time that is spent, at most 1."""
        return min(1.0, (monotonic() - self._start) / self.seconds) if self.seconds > 0 else 1.0

    def part(self, share: float) -> Deadline:
        """A share of what is left, from now, with the same watch."""
        part = Deadline(share * self.seconds * (1 - self.fraction))
        part.watch = self.watch
        return part

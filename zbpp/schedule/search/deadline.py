"""How much of the search's time is left."""

from __future__ import annotations

import time


class Deadline:
    """`seconds` from now. `over` is cheap enough to ask in a loop."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._start = seconds, time.monotonic()

    @property
    def over(self) -> bool:
        return time.monotonic() - self._start >= self.seconds

    @property
    def fraction(self) -> float:
        """The share of the time that is spent, at most 1."""
        return min(1.0, (time.monotonic() - self._start) / self.seconds) if self.seconds > 0 else 1.0

    def part(self, share: float) -> Deadline:
        """A share of what is left, from now."""
        return Deadline(share * self.seconds * (1 - self.fraction))

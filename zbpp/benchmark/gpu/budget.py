"""Shares a run's time out among its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from zbpp.benchmark.gpu.parts import END, TOTAL, PartPlan


class Budget:
    """The time of a run. What a part leaves over goes to those behind it.

    seconds: of the whole run. parts: those that run. Shares and least times are those of parts.py, in
    proportion to `seconds`.
    """

    def __init__(
        self, seconds: float, parts: Sequence[PartPlan], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._scale = clock, seconds / TOTAL
        self._end = clock() + seconds - END * self._scale
        self._waiting = list(parts)

    def next(self) -> tuple[PartPlan, float]:
        """The next part, and its seconds; 0 if it would not fit any more."""
        part, *self._waiting = self._waiting
        left = self._end - self._clock()
        behind = sum(each.least for each in self._waiting) * self._scale
        owed = sum(each.share for each in self._waiting) * self._scale
        # Its share, or what is left when those behind it get theirs; but never what they need at least.
        seconds = min(left, max(part.share * self._scale, left - owed), max(left - behind, 0.0))
        return part, seconds if seconds >= part.least * self._scale else 0.0

    @property
    def is_over(self) -> bool:
        """Whether all parts have had their turn."""
        return not self._waiting

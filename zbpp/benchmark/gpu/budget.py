"""Shares a run's time out among its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from zbpp.benchmark.gpu.parts import END, TOTAL, PartPlan


class Budget:
    """The time of a run. The time that a part leaves over goes to the parts after it.

    seconds: of the whole run. parts: the parts that run. parts.py has each part's share and least time for a
    run of TOTAL seconds; both are scaled to `seconds`.
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
        least_behind = sum(each.least for each in self._waiting) * self._scale
        shares_behind = sum(each.share for each in self._waiting) * self._scale
        # A part gets its share, or more if the parts after it still get theirs. But it leaves those parts
        # the least times that they need.
        wanted = max(part.share * self._scale, left - shares_behind)
        seconds = min(wanted, max(left - least_behind, 0.0))
        return part, seconds if seconds >= part.least * self._scale else 0.0

    @property
    def is_over(self) -> bool:
        """Whether all parts have had their turn."""
        return not self._waiting

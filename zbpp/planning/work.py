"""The work of a microbatch, and the length of a microbatch that has so much work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple, Self

from zbpp.schedule.costs import CostNumbers, PerStage


class Work(NamedTuple):
    """The time (ms) of F, B and W of a microbatch of length 1, as the mean over all stages.

    linear grows with the length, quadratic with the square (zbpp/schedule/costs.py).
    """

    linear: float
    quadratic: float

    @classmethod
    def of(cls, costs: CostNumbers) -> Self:
        """The work that costs say; where all times are 0, work that grows with the length."""
        linear, quadratic = (
            0.0 if part is None else _mean(part.f) + _mean(part.b) + _mean(part.w)
            for part in (costs, costs.quadratic)
        )
        return cls(linear, quadratic) if linear or quadratic else cls(1.0, 0.0)

    def time(self, length: float, square: float) -> float:
        """The work (ms) of a unit of this length and square."""
        return self.linear * length + self.quadratic * square

    def length(self, time: float) -> float:
        """The length of a microbatch with this work (ms), above 0."""
        return 2 * time / (self.linear + math.sqrt(self.linear**2 + 4 * self.quadratic * time))


def _mean(value: PerStage) -> float:
    return fmean(value) if isinstance(value, Sequence) else value

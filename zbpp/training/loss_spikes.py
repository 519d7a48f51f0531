"""Loss spikes: a step's loss far above those of the steps before it.

The rule: over the finite losses of the last 100 steps, with at least 20 of them, let

    median      their median
    deviation   1.4826 x the median of |loss - median|: of normal noise the standard deviation;
                at least 1 % of |median|, so that on a curve without noise a tiny rise is no spike

A loss is a spike if (loss - median) / deviation is larger than `factor`. Median and deviation do not move
with a few spikes. On a falling curve the median lies above the loss, so small spikes are missed there, but
none are reported wrongly. A loss that stays high is no spike any more when half of the last losses are as
high.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

WINDOW, LEAST = 100, 20  # steps
_NORMAL = 1.4826  # the standard deviation of normal noise, in median absolute deviations
_SMALLEST = 0.01  # of the median


class LossSpikes:
    """Finds the spikes of one curve, step by step. factor: how many deviations a spike is above the median.

    in_a_row: how many of the last losses were spikes.
    """

    def __init__(self, factor: float) -> None:
        if not factor > 0:
            raise ValueError(f"loss_spike={factor}: write a number of deviations above 0, or null")
        self.factor, self.in_a_row = factor, 0
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def deviations(self, loss: float) -> float | None:
        """How many deviations a loss is above the median if it is a spike; else None. The loss is noted."""
        if not math.isfinite(loss):
            return None
        found = self._above(loss)
        self._losses.append(loss)
        is_spike = found is not None and found > self.factor
        self.in_a_row = self.in_a_row + 1 if is_spike else 0
        return found if is_spike else None

    @property
    def median(self) -> float:
        """The median of the last losses."""
        return median(self._losses)

    def _above(self, loss: float) -> float | None:
        if len(self._losses) < LEAST:
            return None
        middle = self.median
        deviation = _NORMAL * median(abs(each - middle) for each in self._losses)
        deviation = max(deviation, _SMALLEST * abs(middle))
        return (loss - middle) / deviation if deviation else None

    def state(self) -> list[float]:
        """What a resumed run needs."""
        return list(self._losses)

    def load(self, losses: Iterable[float]) -> None:
        """Go on from a state."""
        self._losses = deque(losses, maxlen=WINDOW)

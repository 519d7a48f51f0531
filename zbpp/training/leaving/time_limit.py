"""A run that ends before its time is over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from zbpp.training.callbacks import Callback
from zbpp.training.update import Metrics

if TYPE_CHECKING:
    from zbpp.training.trainer import Trainer

_WATCHED = 20  # the last steps; the slowest of them says how long a step may take


class TimeLimit(Callback):
    """Ends the run if the next step and all callbacks' `finish` might not be over within the time.

    seconds: counted from `begin`, a time of `clock`; by default from now on. The time of the slowest recent
    step, with evaluation, saving and sampling, counts three times: for the next step, for one more until all
    ranks have agreed, and for what follows the last step. The callbacks' own estimates of their `finish` are
    added.
    """

    def __init__(
        self, seconds: float, *, begin: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._seconds, self._end = seconds, (clock() if begin is None else begin) + seconds
        self._last: float | None = None
        self._steps: deque[float] = deque(maxlen=_WATCHED)

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Note how long the step before took, from its begin to the begin of this step."""
        now = self._clock()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Leave if the time may be over before another step is done and saved."""
        now = self._clock()
        slowest = max([*self._steps, now - (self._last if self._last is not None else now)])
        to_finish = sum(each.seconds_to_finish(trainer) for each in trainer.callbacks)
        # Ranks agree with the next step's loss: one more step may run before all leave.
        if now + 3 * slowest + to_finish > self._end:
            trainer.leave(f"the time limit of {self._seconds / 3600:g} hours")

"""What ends a run early: a signal, or a number of steps.

Signals are SIGTERM, SIGUSR1 (Slurm's warning) and Ctrl-C. The run ends in order after its present step: it
saves, writes its summary, and the process exits with 0.
A second SIGTERM or Ctrl-C ends the process at once. Python runs both handlers when the main thread has done
waiting for a message of another rank. A rank that waits in vain is ended by the launcher's SIGKILL.
"""

from __future__ import annotations

import math
import os
import signal
import time
from threading import current_thread, main_thread
from types import TracebackType
from typing import Any, Self

from zbpp.training.optim.update import Metrics
from zbpp.training.trainer import Callback, Trainer

ENDING = (signal.SIGTERM, signal.SIGINT)  # the second such signal ends the process at once
SIGNALS = (*ENDING, signal.SIGUSR1)
# s: signals that come within this time are one: the terminal (or Slurm) and the launcher may both send it.
SAME = 0.5
_POLL = 0.02  # s


class LeaveOnSignal(Callback):
    """A callback of the trainer, and a context in which signals end the run instead of the process.

    reason: the name of the first signal; None before it. is_shown: whether this rank prints that it came.
    Only the main thread may handle signals: the context changes nothing in another thread.
    """

    def __init__(self, *, is_shown: bool = False) -> None:
        self.reason: str | None = None
        self._is_shown = is_shown
        self._trainer: Trainer | None = None
        self._process = os.getpid()
        self._ended_at: float | None = None  # when the first signal of ENDING was taken
        self._before: dict[int, Any] = {}

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Pass on a signal that came before the first step."""
        self._trainer = trainer
        if self.reason is not None:
            trainer.leave(self.reason)

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Say that the run leaves, once."""
        if self.reason is not None and self._is_shown:
            self._is_shown = False
            print(f"{self.reason}: leaving (a second time: at once)", flush=True)

    def wait(self, seconds: float) -> None:
        """Wait for the first signal, but not longer than so many seconds."""
        end = time.monotonic() + seconds
        while self.reason is None and time.monotonic() < end:
            time.sleep(_POLL)

    def __enter__(self) -> Self:
        if current_thread() is main_thread():
            self._before = {each: signal.signal(each, self._take) for each in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._trainer, self._before = None, {}

    def _take(self, number: int, frame: object) -> None:
        """Leave the run at the first signal; end the process at the second."""
        if os.getpid() != self._process:  # in a forked worker of a data loader
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.reason is None:
            self.reason = signal.Signals(number).name
            if self._trainer is not None:
                self._trainer.leave(self.reason)
        if number not in ENDING:
            return
        if self._ended_at is None:
            self._ended_at = math.inf
            time.sleep(SAME)  # in a sleep Python runs a handler at once; in a step it may run much later
            self._ended_at = time.monotonic()
        elif time.monotonic() - self._ended_at > SAME:
            os._exit(128 + number)


class StopAfter(Callback):
    """Leaves the run after `num_steps` steps, counted from this start; a later start may go on."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._num_done = num_steps, 0

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Count the step."""
        self._num_done += 1
        if self._num_done == self._num_steps:
            trainer.leave(f"stop_after={self._num_steps}", agreed=True)

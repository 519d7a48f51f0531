"""What ends a run early: a signal, a metric that improves no more, a number of steps.

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


# ----------------------------------------------------------------
# A run that ends when a metric improves no more, or after a number of steps.


class MetricError(ValueError):
    """The metric to watch is not among those of an evaluation."""


class EarlyStop(Callback):
    """Ends the run after `patience` evaluations in a row without a better value of `metric`.

    A value is better if it is smaller than the best one by more than min_delta; with mode="max", larger.
    NaN is never better. Evaluations are equal on all ranks, so all ranks decide alike.
    Raises MetricError at the first evaluation that has no such metric.
    """

    def __init__(self, metric: str, *, patience: int = 3, min_delta: float = 0.0, mode: str = "min") -> None:
        self.metric, self.patience, self.min_delta, self.mode = metric, patience, min_delta, mode
        self.best: float | None = None
        self.best_step = self.num_without_better = 0

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Compare an evaluation with the best one."""
        found = [name for name in (known[-1] if known else {}) if name.startswith("evaluation_")]
        if not found:
            return
        if self.metric not in found:
            raise MetricError(
                f"EarlyStop(metric={self.metric!r}): an evaluation has {', '.join(found)}: write one of them"
            )
        value = float(known[-1][self.metric])
        if self._is_better(value):
            self.best, self.best_step, self.num_without_better = value, known[-1]["step"], 0
            return
        self.num_without_better += 1
        if self.num_without_better >= self.patience:
            best = "it was never a number" if self.best is None else f"{self.best:g} at step {self.best_step}"
            times = f"{self.patience} evaluations" if self.patience > 1 else "one evaluation"
            trainer.leave(f"{self.metric} improved no more in {times}; best: {best}", agreed=True)

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, float | int | None]:
        """What a resumed run needs to go on counting."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "num_without_better": self.num_without_better,
        }

    def load_state_dict(self, state: dict[str, float | int | None]) -> None:
        """Go on from a `state_dict`."""
        self.best = state["best"]
        self.best_step = int(state["best_step"] or 0)
        self.num_without_better = int(state["num_without_better"] or 0)


class StopAfter(Callback):
    """Leaves the run after `num_steps` steps, counted from this start; a later start may go on."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._num_done = num_steps, 0

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Count the step."""
        self._num_done += 1
        if self._num_done == self._num_steps:
            trainer.leave(f"stop_after={self._num_steps}", agreed=True)

"""Signals that ask a run to end: SIGTERM, SIGUSR1 (Slurm's warning) and Ctrl-C.

The run ends in order behind the step that runs: it saves, writes its summary, and the process exits with 0.
A second SIGTERM or Ctrl-C ends the process at once.

Python runs no signal handler while the main thread waits for a message of another rank. So a thread learns of
signals: Python's C code writes their numbers into a pipe at once, whatever the main thread does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from threading import Thread, current_thread, main_thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from zbpp.training.callbacks import Callback

if TYPE_CHECKING:
    from zbpp.training.trainer import Trainer

ENDING = (signal.SIGTERM, signal.SIGINT)  # of these, the second one ends the process at once
SIGNALS = (*ENDING, signal.SIGUSR1)
# s: Ctrl-C and SIGTERM may come twice at the same time, from the terminal or Slurm and from the launcher.
SAME = 0.5


class LeaveOnSignal(Callback):
    """Inside the with block signals end the run, not the process; a callback of the trainer that runs it.

    reason: the name of the first signal; None before it. is_shown: whether this rank says that it came.
    Outside the main thread, which alone may handle signals, the block changes nothing.
    """

    def __init__(self, *, is_shown: bool = False) -> None:
        self.reason: str | None = None
        self._is_shown = is_shown
        self._trainer: Trainer | None = None
        self._ended_at: float | None = None  # when the first signal of ENDING came
        self._before: dict[int, Any] = {}

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Pass on a signal that came before the first step."""
        self._trainer = trainer
        if self.reason is not None:
            trainer.leave(self.reason)

    def __enter__(self) -> Self:
        if current_thread() is main_thread():
            read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._before = {each: signal.signal(each, _do_nothing) for each in SIGNALS}
            os.register_at_fork(before=self._hold, after_in_parent=self._let_go, after_in_child=self._forget)
            Thread(target=self._listen, args=(read,), name="zbpp signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            for each, handler in self._before.items():
                signal.signal(each, handler)
            signal.set_wakeup_fd(self._fd_before)
            os.close(self._write)  # the thread's end
        self._trainer, self._before = None, {}

    def _hold(self) -> None:
        """Before a fork: the child shares the pipe, so a signal must not reach it before `_forget`."""
        if self._before:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _let_go(self) -> None:
        if self._before:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _forget(self) -> None:
        """In a forked process: a signal to it is not one to this rank, and ends it as usual."""
        if self._before:
            signal.set_wakeup_fd(-1)
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            self._let_go()
            self._before = {}

    def _listen(self, read: int) -> None:
        with suppress(OSError):
            while numbers := os.read(read, 64):
                for number in numbers:
                    self._take(signal.Signals(number))
        os.close(read)

    def _take(self, received: signal.Signals) -> None:
        """Note one signal. Runs in the thread."""
        if received not in SIGNALS:
            return
        now = time.monotonic()
        if received in ENDING:
            if self._ended_at is not None and now - self._ended_at > SAME:
                os._exit(128 + received)  # the main thread may be blocked
            self._ended_at = self._ended_at or now
        if self.reason is not None:
            return
        self.reason = received.name
        if self._is_shown:
            print(f"{received.name}: leaving after this step (a second time: at once)", file=sys.stderr)
        if self._trainer is not None:
            self._trainer.leave(received.name)


def _do_nothing(*_: object) -> None:
    """A handler must be there, or the signal ends the process."""

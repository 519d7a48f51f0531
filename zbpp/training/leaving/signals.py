"""Signals that ask a run to end: SIGTERM, SIGUSR1 (Slurm's warning) and Ctrl-C.

The run ends in order after its present step: it saves, writes its summary, and the process exits with 0.
A second SIGTERM or Ctrl-C ends the process at once.

Python runs no signal handler while the main thread waits for a message of another rank. But Python's C code
writes the number of a signal into a pipe at once, and a thread reads the pipe.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from threading import Thread, Timer, current_thread, main_thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from zbpp.training.callbacks import Callback

if TYPE_CHECKING:
    from zbpp.training.trainer import Trainer

ENDING = (signal.SIGTERM, signal.SIGINT)  # the second such signal ends the process at once
SIGNALS = (*ENDING, signal.SIGUSR1)
# s: signals that come within this time are one: the terminal (or Slurm) and the launcher may both send it.
SAME = 0.5
_POLL = 0.02  # s
_SOON = 1.0  # s after which a process that has not ended says that it got a signal


class LeaveOnSignal(Callback):
    """A callback of the trainer, and a context in which signals end the run instead of the process.

    reason: the name of the first signal; None before it. is_shown: whether this rank prints that it came.
    Only the main thread may handle signals: the context changes nothing in another thread.
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

    def wait(self, seconds: float) -> None:
        """Wait for the first signal, but not longer than so many seconds."""
        end = time.monotonic() + seconds
        while self.reason is None and time.monotonic() < end:
            time.sleep(_POLL)

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
        """Hold signals back during a fork: the child shares the pipe until its `_forget`."""
        if self._before:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _let_go(self) -> None:
        if self._before:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _forget(self) -> None:
        """Give signals their usual effect in a forked child: they are not signals to this rank."""
        if self._before:
            signal.set_wakeup_fd(-1)
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)
            self._let_go()
            self._before = {}

    def _listen(self, read: int) -> None:
        with suppress(OSError):
            while numbers := os.read(read, 64):
                for number in numbers:  # of every signal that has a handler, also a user's
                    if number in SIGNALS:
                        self._take(signal.Signals(number))
        os.close(read)

    def _take(self, received: signal.Signals) -> None:
        """Leave the run at the first signal; end the process at the second. Runs in the thread."""
        now = time.monotonic()
        if received in ENDING:
            if self._ended_at is not None and now - self._ended_at > SAME:
                os._exit(128 + received)  # the main thread may be blocked
            self._ended_at = self._ended_at or now
        if self.reason is not None:
            return
        self.reason = received.name
        if self._trainer is not None:
            self._trainer.leave(received.name)
        if self._is_shown:
            announcement = Timer(_SOON, self._announce, [received.name])
            announcement.daemon = True
            announcement.start()

    def _announce(self, name: str) -> None:
        """Say it, unless the process ends already: a launcher sends SIGTERM when another rank has failed."""
        if self._before:
            print(f"{name}: leaving after this step (a second time: at once)", file=sys.stderr, flush=True)


def _do_nothing(*_: object) -> None:
    """Handle a signal: without any handler it would end the process."""

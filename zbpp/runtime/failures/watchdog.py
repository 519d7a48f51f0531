"""Watchdog: a thread that looks once a second whether its rank still does something.

A rank that waits for a message gives up at its timeout, and raises an error. A rank that loops in its own
code raises nothing, and no signal but SIGKILL ends a rank that waits in gloo. Then the other ranks fail, and
torchelastic ends this process after its grace. Before that, the thread writes the rank's record. In a job
without torchelastic nobody would end the process: there the thread does.

Code that never gives up Python's lock keeps this thread from running. For that case the thread sets an alarm
of faulthandler anew each second: its C code needs no lock.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import weakref
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

if TYPE_CHECKING:
    from zbpp.runtime.failures.flight_recorder import FlightRecorder

_INTERVAL = 0.5  # s
_GRACE = 1.0  # s after the timeout: by then the ranks that waited for this one have given up
_PATIENCE = 5.0  # s that `close` waits for the thread, which may write to a disk
_ALARM = 2.0  # s after the timeout: longer than the thread needs to end the process itself


class HangError(RuntimeError):
    """A rank did not come back from an instruction."""


class Watchdog:
    """Lets a recorder write its file when its rank has done nothing for `timeout` seconds.

    ends_process: end this process then, if an instruction is what lasts so long. Between calls a rank may be
    busy for longer, with a checkpoint for example: its file is removed again when the rank goes on.
    """

    def __init__(self, recorder: FlightRecorder, timeout: float, *, ends_process: bool) -> None:
        # A weak reference: a pipeline that is dropped without `close` ends its thread, too.
        self._recorder = weakref.ref(recorder)
        self._timeout, self._ends_process = timeout, ends_process
        self._closed, self._is_written = threading.Event(), False
        if ends_process:  # code may hold the lock before the thread runs first
            _set_alarm(timeout + _ALARM)
        self._thread = threading.Thread(target=self._run, name="zbpp-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the process lives, however long nothing happens."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)  # it may set its alarm once more
        if self._ends_process:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._closed.wait(_INTERVAL):
            recorder = self._recorder()
            if recorder is None:
                return self.close()
            self._look_at(recorder)
            del recorder

    def _look_at(self, recorder: FlightRecorder) -> None:
        kind, _, begun = recorder.newest
        is_quiet = monotonic() - begun > self._timeout + _GRACE
        if is_quiet and not self._is_written:
            recorder.write()
        elif self._is_written and not is_quiet:
            recorder.discard()
        self._is_written = is_quiet
        if self._ends_process:
            if is_quiet and kind == "at":
                who = f"rank {recorder.process} did not come back from its own code"
                _end_process(f"{who}: it is {recorder.place}")
            _set_alarm(self._timeout + _ALARM)


def _set_alarm(seconds: float) -> None:
    """Unless this is called again in time, show what each thread does, and end the process."""
    with suppress(AttributeError, ValueError, OSError):  # where standard error is no file
        number = sys.__stderr__.fileno()  # type: ignore[union-attr]
        faulthandler.dump_traceback_later(seconds, exit=True, file=number)


def _end_process(why: str) -> None:
    """End this process, whose main thread does not come back; leave the reason where torchelastic looks."""
    get_error_handler().record_exception(HangError(why))
    print(f"error: {why}", file=sys.stderr, flush=True)
    with suppress(AttributeError, ValueError, OSError):  # where standard error is no file
        faulthandler.dump_traceback()
    os._exit(1)

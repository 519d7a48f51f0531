"""A rank ends with the process that started it: an orphan would train on, into its successor's files.

A thread waits for that process's end. This holds for torchrun's ranks and for those of `zbpp train -n`, which
are forks of a server or, with CUDA, new processes. A process that somebody started by hand, with RANK in its
environment, stays: its parent may be a shell that is closed.

A loop of a user's own is not ended: the process is the user's, who may call `end_with_launcher` in it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.connection import wait
from threading import Thread

GONE = 1  # the exit status of a rank whose launcher is gone


def end_with_launcher() -> None:
    """End this process as soon as torchrun, or the process that started it as a rank, is gone.

    Does nothing in a process that nobody started as a rank of a job, and on systems without handles of
    processes (pidfd: Linux 5.3).
    """
    started_by = parent_process()
    if started_by is not None:  # also where the parent by number is a fork server
        _end_after(started_by.sentinel)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError, AttributeError):
            _end_after(os.pidfd_open(os.getppid()))


def _end_after(process: int) -> None:
    """process: a handle of it."""

    def run() -> None:
        wait([process])
        os._exit(GONE)

    Thread(target=run, name="zbpp-launcher", daemon=True).start()

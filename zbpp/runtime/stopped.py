"""Processes of the job that are stopped (SIGSTOP, Ctrl-Z) when the job fails: they are let run, to end.

A stopped process heeds no signal but SIGKILL and SIGCONT, so torchrun would wait for it for half a minute.
Running again, it finds out that the job has failed, leaves its record, and ends.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Address(NamedTuple):
    """A process of some machine. began: when it began, as its machine counts: numbers come again."""

    host: str
    pid: int
    began: str


def address() -> Address:
    """This process's."""
    _, began = _state_of(os.getpid())
    return Address(socket.gethostname(), os.getpid(), began)


def let_run(process: Address) -> bool:
    """Send SIGCONT to a process of this machine if it is stopped; returns whether it was."""
    if process.host != socket.gethostname() or _state_of(process.pid) != ("T", process.began):
        return False
    with suppress(OSError):
        os.kill(process.pid, signal.SIGCONT)
        return True
    return False


def _state_of(pid: int) -> tuple[str, str]:
    """(state, time of its begin) of a process; ("", "") if there is none, or where Linux's /proc is not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]  # fields 3 and 22 of proc(5)

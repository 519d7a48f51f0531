"""A rank ends with the process that started it: an orphan would train on, into its successor's files.

A thread waits for that process's end. This holds for torchrun's ranks and for those of `zbpp train -n`, which
are forks of a server or, with CUDA, new processes. A process that somebody started by hand, with RANK in its
environment, stays: its parent may be a shell that is closed.

A loop of a user's own is not ended: the process is the user's, who may call `end_with_launcher` in it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread

GONE = 1  # the exit status of a rank whose launcher is gone
_ADOPTER = 1  # the process that gets orphans
_NAME = "zbpp-launcher"
_INTERVAL = 1.0  # s, where the system has no handles of processes


def end_with_launcher() -> None:
    """End this process as soon as torchrun, or the process that started it as a rank, is gone.

    Does nothing in a process that nobody started as a rank of a job.
    """
    started_by = parent_process()
    if started_by is not None:  # also where the parent by number is a fork server
        _watch([started_by.sentinel])
    elif "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_torchrun()


def _end_with_torchrun() -> None:
    """torchrun starts each rank, or the script around it, in a session of its own."""
    leader, is_its_child = os.getsid(0), True
    child, agent = leader, _parent_of(leader)
    if leader != os.getpid() and b"\0RANK=" not in _read(f"/proc/{leader}/environ"):
        child, agent, is_its_child = os.getpid(), os.getppid(), False  # in the session of somebody else
    if agent == _ADOPTER and is_its_child and not _starts_ranks(agent):
        os._exit(GONE)
    with suppress(OSError, AttributeError):  # an old kernel, another system
        handle = os.pidfd_open(agent)
        if _parent_of(child) == agent:  # else it has ended meanwhile, and its number may be another's now
            return _watch([handle])
        os._exit(GONE)
    if agent:  # 0: outside of this container
        Thread(target=_look_again_and_again, args=(child, agent), name=_NAME, daemon=True).start()


def _starts_ranks(pid: int) -> bool:
    """Whether the first process of a container may be torchrun, and not the process that adopts orphans."""
    command = _read(f"/proc/{pid}/cmdline")
    return not command or b"torch" in command or b"python" in command


def _read(path: str) -> bytes:
    with suppress(OSError):
        return b"\0" + Path(path).read_bytes()
    return b""


def _parent_of(pid: int) -> int:
    """The number of a process's parent; 0 if it is gone."""
    if pid == os.getpid():
        return os.getppid()
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _watch(handles: list[int]) -> None:
    Thread(target=_end_after, args=(handles,), name=_NAME, daemon=True).start()


def _end_after(handles: list[int]) -> None:
    wait(handles)
    os._exit(GONE)


def _look_again_and_again(child: int, agent: int) -> None:
    while _parent_of(child) == agent:
        time.sleep(_INTERVAL)
    os._exit(GONE)

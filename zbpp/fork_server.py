"""One process imports what all ranks need; each rank is a fork of it, and so begins at once.

Importing torch, its distributed parts and zbpp takes five seconds of a core, for each rank anew otherwise.
It is Python's fork server (multiprocessing), with four things that a job needs besides:

- it imports zbpp from where this process did, not a zbpp that lies in the current folder;
- signals to the whole job, as Slurm sends them, do not end it before the ranks have saved;
- a rank ends when the process that started the job is gone, since the fork server would outlive that process;
- no process of a user's, which a rank has started, keeps the server alive after the job.

With CUDA each rank is a new process instead: a fork of a process that has looked for devices can't use them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from zbpp.end_with_launcher import end_with_launcher

# The second one is what the first optimizer of a process would import.
_IMPORTS = ["zbpp.run.app", "torch._dynamo"]
_OF_THE_RANKS = {signal.SIGTERM, signal.SIGUSR1}
_LAST = -1000  # after all other finalizers, which may tell the tracker something
_PATIENCE = 1.0  # s
_HOME = Path(__file__).parents[1]
_PYTHONS_PATH = ("PYTHONPATH", "PYTHONSAFEPATH")


def start_method() -> str:
    """How multiprocessing starts a rank; starts the fork server, once, if ranks are forks of it."""
    import torch

    if torch.cuda.is_available() or "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(_IMPORTS)
    resource_tracker.ensure_running()  # it would unblock the signals
    with _imports_from_here(), _blocked_signals():
        forkserver.ensure_running()
    Finalize(None, _end_tracker, exitpriority=_LAST)
    return "forkserver"


def begin_as_a_rank() -> None:
    """Undo in a rank what only the fork server needs; end the rank with the process that started the job."""
    for name in _PYTHONS_PATH:
        if _SAVED + name in os.environ:
            _set(name, os.environ.pop(_SAVED + name) or None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_RANKS)
    _leave_nothing_to_children()
    end_with_launcher()


def _leave_nothing_to_children() -> None:
    """Let no child process of the user's, which may outlive the run, hold up the end of our helpers.

    The fork server and Python's resource tracker end when all copies of a pipe are closed. A rank has one of
    each: it needs the fork server's for nothing, and the tracker's for itself and its forks.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.set_inheritable(tracker._fd, False)


def _end_tracker() -> None:
    """End the resource tracker, even if a fork of a rank lives on and has its pipe."""
    tracker: Any = resource_tracker._resource_tracker
    pid, fd = tracker._pid, tracker._fd
    if pid is None or fd is None:
        return
    tracker._pid = tracker._fd = None
    with suppress(OSError):
        os.close(fd)
        end = time.monotonic() + _PATIENCE
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


_SAVED = "ZBPP_SAVED_"  # + a name: the value of this environment variable in the process that starts a job


@contextmanager
def _imports_from_here() -> Iterator[None]:
    """A Python that starts inside finds zbpp where this process did, and nothing in the current folder."""
    saved = {name: os.environ.get(name) for name in _PYTHONS_PATH}
    os.environ.update({_SAVED + name: value or "" for name, value in saved.items()})
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.path.insert(0, str(_HOME))  # newer Pythons give it to the fork server
    if not _is_installed():
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_HOME), saved["PYTHONPATH"]]))
    try:
        yield
    finally:
        sys.path.remove(str(_HOME))
        for name, value in saved.items():
            del os.environ[_SAVED + name]
            _set(name, value)


def _is_installed() -> bool:
    """Whether zbpp lies among the installed packages, which Python finds without being told."""
    return _HOME.name in ("site-packages", "dist-packages")


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """A process that starts inside does not notice these signals; its forks may unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_RANKS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

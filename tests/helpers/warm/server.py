"""Import torch and zbpp, then fork for each client: server.py LISTENER PYTHON (see __init__.py).

LISTENER: the number of a listening socket. PYTHON: the command with which the forks start new processes.
The server ends when its standard input does.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from types import ModuleType
from typing import Any

# After zbpp: what torchrun, the first optimizer of a process and its first picture import.
IMPORTS = ["zbpp.run.app", "torch.distributed.run", "torch._dynamo", "matplotlib.figure"]
ABOVE = 1000  # numbers of open files that no client has


def main() -> None:
    listener, python = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    installed = sys.path[len(entries(os.environ)) :]
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector writes to what it looks at: a fork would copy it
    while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [])[0]):
        assert ready
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            job = begin(client)
            sys.path[:] = [*entries(job["environment"]), *installed]
            os.environ["PYTHON_EXEC"] = python  # what torchrun starts
            sys.executable = python  # what a program starts itself again by
            multiprocessing.set_executable(python)
            return run_to_the_end(job["arguments"])
        client.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def entries(environment: Any) -> list[str]:
    return [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]


def begin(client: socket.socket) -> dict[str, Any]:
    """Fork once more; returns in the fork alone, which has the client's folder, files and environment.

    This process waits for the fork and tells the client its process id and its status.
    """
    header, received, *_ = socket.recv_fds(client, 8, 256)
    size, text = int.from_bytes(header, "little"), b""
    while len(text) < size:
        text += client.recv(size - len(text))
    job: dict[str, Any] = json.loads(text)
    pid = os.fork()
    if pid:
        os.closerange(0, 3)
        for each in received:
            os.close(each)
        tell(client, pid)
    client.close()
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, ABOVE) for each in received]
    for each in received:
        os.close(each)
    for each, number in zip(high, job["files"], strict=True):
        os.dup2(each, number, inheritable=True)
        os.close(each)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    random.seed()
    signal.pthread_sigmask(signal.SIG_SETMASK, job["blocked"])
    return job


def tell(client: socket.socket, pid: int) -> None:
    """Write the id of a child and, at its end, its status; kill it if the client is killed."""
    child = os.pidfd_open(pid)
    client.sendall(b"%d\n" % pid)
    if child not in select.select([client, child], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        client.sendall(b"%d\n" % status)
    os._exit(0)


def run_to_the_end(arguments: list[str]) -> None:
    """Run, then end this process as Python does, but free no memory: to touch shared memory copies it."""
    status = 0
    try:
        run(arguments)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        status = ended.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(status)


def run(arguments: list[str]) -> None:
    """Do what `python *arguments` does."""
    # Lines of several ranks stay whole: without a buffer a line is several writes.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    is_safe = "PYTHONSAFEPATH" in os.environ
    while arguments[0] not in ("-c", "-m") and arguments[0].startswith("-"):
        flag, *arguments = arguments
        is_safe = is_safe or flag == "-P"
        if flag not in ("-P", "-B", "-u"):
            raise ValueError(f"a warm Python does not know {flag}")
    first, *rest = arguments
    if first in ("-c", "-m"):
        what, *rest = rest
        sys.argv = [first, *rest]
        folder = "" if first == "-c" else os.getcwd()
    else:
        what, folder = first, os.path.dirname(os.path.realpath(first))
        sys.argv = arguments
    if not is_safe:
        sys.path.insert(0, folder)
    if first == "-c":
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(what, main.__dict__)
    elif first == "-m":
        sys.modules.pop(what, None)  # runpy warns of a module that is imported already
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    main()

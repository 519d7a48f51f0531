"""End a process and all that it has started, also in sessions of their own, as torchrun's ranks are."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

Begun = dict[int, str]  # id: when the process began, by the kernel's clock; the system reuses ids
_PATIENCE = 5.0  # s after SIGTERM
_KILLED = 10.0  # s after SIGKILL: a process inside a driver's system call may take longer to end
_POLL = 0.05  # s


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process by SIGTERM; after some seconds, end it and its descendants by SIGKILL if they still run.

    Without /proc the descendants are not known: then the process itself has to end them.
    """
    found = tree_of([process.pid])
    with suppress(ProcessLookupError):
        process.terminate()
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and (process.poll() is None or _left(found)):
        found |= tree_of(found)
        time.sleep(_POLL)
    end = time.monotonic() + _KILLED
    while time.monotonic() < end and _left(found):  # a killed process takes a moment to end
        found |= tree_of(found)
        for number in _left(found):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        process.poll()
        time.sleep(_POLL)
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()


def tree_of(roots: Iterable[int]) -> Begun:
    """The processes of these numbers and their descendants, as far as they run now."""
    parents, begun = dict[int, int](), Begun()
    for path in Path("/proc").glob("[0-9]*"):
        number = int(path.name)
        parent, when = _look_at(number)
        if when:
            parents[number], begun[number] = parent, when
    found = [root for root in roots if root in begun]
    for number in found:  # grows
        found += [child for child, parent in parents.items() if parent == number and child not in found]
    return {number: begun[number] for number in found}


def _left(processes: Begun) -> list[int]:
    return [number for number, when in processes.items() if _look_at(number)[1] == when]


def _look_at(number: int) -> tuple[int, str]:
    """(parent, when it began); (0, "") for one that has ended: fields 3, 4 and 22 of proc(5)."""
    with suppress(OSError):
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            return int(fields[1]), fields[19]
    return 0, ""

"""End a process and all that it has started, also in sessions of their own, as torchrun's ranks are."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

Begun = dict[int, str]  # when each process began, by the kernel's clock: a number may be given away again
_POLL = 0.05  # s


def end_tree(process: subprocess.Popen[bytes], grace: float = 5.0) -> None:
    """End a process by SIGTERM, and after `grace` seconds what is left of it and its descendants by SIGKILL.

    Without /proc the descendants are not known: then the process itself has to end them.
    """
    found = tree_of(process.pid)
    with suppress(ProcessLookupError):
        process.terminate()
    end = time.monotonic() + grace
    while time.monotonic() < end and (process.poll() is None or _left(found)):
        found |= tree_of(process.pid)
        time.sleep(_POLL)
    for number in _left(found | tree_of(process.pid)):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(number, signal.SIGKILL)
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()


def tree_of(root: int) -> Begun:
    """The process and its descendants that run now."""
    parents = dict[int, int]()
    begun = Begun()
    for path in Path("/proc").glob("[0-9]*"):
        number = int(path.name)
        parent, when = _look_at(number)
        if when:
            parents[number], begun[number] = parent, when
    found = [root] if root in begun else []
    for number in found:  # grows
        found += [child for child, parent in parents.items() if parent == number]
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

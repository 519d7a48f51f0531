"""Which processes the job's ranks are, so that a rank can say whose process is gone."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zbpp.runtime.world import gather


class Member(NamedTuple):
    """A rank's process. host: with the namespace of its number. begun: when, by the kernel's clock.

    launcher: torchrun's number of the node; "" without torchrun.
    """

    host: str
    process: int
    begun: str
    launcher: str


def roster() -> list[Member]:
    """The process of each rank. Collective."""
    return gather(_this_process())


def gone(members: list[Member]) -> list[int]:
    """The ranks of this host whose process has ended. A process of another host can't be looked at."""
    here = _this_process()
    if not here.begun:  # no Linux
        return []
    local = [(rank, each) for rank, each in enumerate(members) if each.host == here.host]
    return [rank for rank, each in local if _begun(each.process) != each.begun]


def _this_process() -> Member:
    namespace = 0
    with suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return Member(
        f"{socket.gethostname()} {namespace}",
        os.getpid(),
        _begun(os.getpid()),
        os.environ.get("GROUP_RANK", ""),
    )


def _begun(process: int) -> str:
    """When a process began; nothing if it has ended, also if its parent has not been told so yet."""
    with suppress(OSError):
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else numbers[18]
    return ""

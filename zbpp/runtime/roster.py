"""Which processes the job's ranks are, so that a rank can say whose process is gone, or stopped.

A stopped process (SIGSTOP, Ctrl-Z) heeds no signal but SIGKILL and SIGCONT, so torchrun would wait for it for
half a minute. Let run again, it finds out that the job has failed, leaves its record, and ends.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from zbpp.runtime.world import gather

State = Literal["", "runs", "stopped", "gone"]  # "": nothing is known


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
    return gather(this_process())


def this_process() -> Member:
    """This one."""
    namespace = 0
    with suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    number = os.getpid()
    launcher = os.environ.get("GROUP_RANK", "")
    return Member(f"{socket.gethostname()} {namespace}", number, _look_at(number)[1], launcher)


def state_of(member: Member) -> State:
    """What a process of this host does. One of another host can't be looked at, nor one without Linux."""
    here = this_process()
    if not here.begun or member.host != here.host:
        return ""
    state, begun = _look_at(member.process)
    if begun != member.begun or state in "ZX":  # ended, also if its parent has not been told so yet
        return "gone"
    return "stopped" if state == "T" else "runs"


def gone(members: list[Member]) -> list[int]:
    """The ranks of this host whose process has ended."""
    return [rank for rank, each in enumerate(members) if state_of(each) == "gone"]


def let_run(member: Member) -> None:
    """Send SIGCONT to a process of this host if it is stopped."""
    if state_of(member) == "stopped":
        with suppress(OSError):
            os.kill(member.process, signal.SIGCONT)


def _look_at(process: int) -> tuple[str, str]:
    """(state, when it began) of a process; ("", "") if there is none: fields 3 and 22 of proc(5)."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    return "", ""

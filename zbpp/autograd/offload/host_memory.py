"""How much memory the machine has left for this process.

Linux allocates more memory than there is, and kills a process that writes to too much of it, without an error
that the process could report. So callers check before they allocate a large amount.
"""

from __future__ import annotations

from pathlib import Path

_PROC, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """The bytes that this process can still use: the smaller of the machine's and its container's figure.

    None if the system tells neither.
    """
    known = [each for each in (_of_machine(), _of_container()) if each is not None]
    return min(known, default=None)


def refuse_more_than_available(nbytes: int) -> None:
    """Raise MemoryError if fewer than `nbytes` are available."""
    available = available_bytes()
    if available is not None and nbytes > available:
        raise MemoryError(f"{nbytes} bytes are needed, {available} are available on this machine")


def _of_machine() -> int | None:
    try:
        lines = _PROC.read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _of_container() -> int | None:
    """What the limit of the control group (version 2) leaves. Inactive file pages count as free."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())  # "max": no limit
        used = int((_CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(statistics.get("inactive_file", 0))
    except (OSError, ValueError):
        return None

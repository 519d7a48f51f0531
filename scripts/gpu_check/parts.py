"""Runs each part as a process with a limit, and puts the parts' files together as one page."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

LEAST = 10.0  # s: with less left no part begins
_POLL = 0.2  # s between two looks at what may stop a part early
_LINES = 150  # the last ones of standard error that the page of a part that failed has
_PR_SET_PDEATHSIG = 1  # of Linux: see prctl(2)


class Part(NamedTuple):
    """limit: seconds. environment: what its process has beside this process's."""

    name: str
    limit: float
    environment: Mapping[str, str] = MappingProxyType({})


def run_parts(
    parts: Iterable[Part], command: Callable[[Part], Sequence[str]], out: Path, *, title: str, seconds: float
) -> list[str]:
    """Run the parts one after the other; returns the names of those that failed or were left out.

    command: of a part, whose limit may be what is left of `seconds`. OUT/page.md has all parts that OUT has
    files of; it is written anew after each part, also if the part is ended by SystemExit.
    """
    out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + seconds, []
    for part in parts:
        left = end - time.monotonic()
        path = new_file(out, part.name)
        try:
            if left < LEAST:
                leave_out(part, path, left)
                failed.append(part.name)
            else:
                limited = part._replace(limit=min(part.limit, left))
                failed += [] if run_part(limited, command(limited), path) else [part.name]
        finally:
            write_page(out, title)
            print(path.read_text(), flush=True)
    return failed


def run_part(part: Part, command: Sequence[str], path: Path, stop: Callable[[], str] = lambda: "") -> bool:
    """Run one part, whose output goes to a file; whether it ended well.

    A part that is there at its limit is ended, with all processes that it has started; and so is a part for
    which `stop` gives a reason.
    """
    begin, errors, ended = time.monotonic(), path.with_suffix(".err"), "STOPPED from outside"
    with path.open("w") as file, errors.open("w") as error_file:
        print(f"## {part.name}", file=file, flush=True)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=error_file,
            start_new_session=True,
            env={**os.environ, **part.environment},
        )
        try:
            ended = _ended(process, part.limit, stop)
        finally:
            _end_session(process)
            told = "\n".join(errors.read_text(errors="replace").splitlines()[-_LINES:])
            if ended and told:
                print(f"\n\n```\n{told}\n```", file=file)
            print(f"\n{part.name}: {ended or 'fine'}, {time.monotonic() - begin:.1f} s", file=file)
    if not errors.read_text():
        errors.unlink()
    return not ended


def leave_out(part: Part, path: Path, left: float) -> None:
    """Write that a part was not begun, with so many seconds left for it."""
    path.write_text(f"## {part.name}\n\nLEFT OUT: {max(left, 0):.0f} s are left for it\n")


def write_page(out: Path, title: str) -> None:
    """Put all parts' files together, in the order in which they were begun."""
    files = sorted(out.glob("[0-9]*.md"), key=lambda path: int(path.stem.partition("-")[0]))
    text = "\n".join([f"# {title}\n", *(path.read_text() for path in files)])
    whole = out / "page.md.new"
    whole.write_text(text)
    whole.replace(out / "page.md")  # a reader finds the old page or the new one


def new_file(out: Path, name: str) -> Path:
    """3-split.md: a file that is not there yet."""
    numbers = [int(path.stem.partition("-")[0]) for path in out.glob("[0-9]*.md")]
    return out / f"{max(numbers, default=0) + 1}-{name}.md"


# ---- Nothing is left running


def exit_on_sigterm() -> None:
    """Let SIGTERM, which `timeout` and torchrun send, end this process by SystemExit: its part ends, too."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def end_with_parent() -> None:
    """Let this process end when its parent ends, however that ends. On Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _ended(process: subprocess.Popen[bytes], limit: float, stop: Callable[[], str]) -> str:
    """Wait for a process; how it ended, or why it has to; "" if it ended well."""
    end = time.monotonic() + limit
    while True:
        left = end - time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(min(_POLL, max(left, 0.0)))
            return "" if status == 0 else f"FAILED: {_text_of(status)}"
        if left <= 0:
            return f"STOPPED at its limit of {limit:.0f} s"
        if reason := stop():
            return f"STOPPED: {reason}"


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the part's process, and what it has started and left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text_of(status: int) -> str:
    return f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"

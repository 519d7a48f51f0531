"""Runs each part as a process with a limit, and puts the parts' files together as one page."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_LEAST = 10.0  # s: with less left no part begins


class Part(NamedTuple):
    """limit: seconds."""

    name: str
    limit: float


def run_parts(
    parts: Iterable[Part],
    command: Callable[[Part], Sequence[str]],
    out: Path,
    *,
    title: str,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run the parts one after the other; returns how many failed or were left out.

    command: of a part, whose limit may be what is left of `seconds`. OUT/page.md has all parts that OUT has
    files of; it is written anew after each part.
    """
    out.mkdir(parents=True, exist_ok=True)
    end, num_failed = time.monotonic() + seconds, 0
    for part in parts:
        left = end - time.monotonic()
        path = new_file(out, part.name)
        if left < _LEAST:
            path.write_text(f"## {part.name}\n\nLEFT OUT: {left:.0f} s of {seconds:.0f} s are left\n")
            num_failed += 1
        else:
            limited = part._replace(limit=min(part.limit, left))
            num_failed += not run_part(limited, command(limited), path, environment)
        write_page(out, title)
        print(path.read_text(), flush=True)
    return num_failed


def run_part(
    part: Part, command: Sequence[str], path: Path, environment: Mapping[str, str] | None = None
) -> bool:
    """Run one part, whose output goes to a file; whether it ended well.

    A part that is there at its limit is ended, with all processes that it has started.
    """
    begin, errors = time.monotonic(), path.with_suffix(".err")
    with path.open("w") as file, errors.open("w") as error_file:
        print(f"## {part.name}", file=file, flush=True)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=error_file,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            status = process.wait(part.limit)
            ended = "" if status == 0 else f"FAILED: {_text_of(status)}"
        except subprocess.TimeoutExpired:
            ended = f"STOPPED at its limit of {part.limit:.0f} s"
        finally:
            _end_session(process)
        told = "\n".join(errors.read_text(errors="replace").splitlines()[-60:])
        if ended and told:
            print(f"\n\n```\n{told}\n```", file=file)
        print(f"\n{part.name}: {ended or 'fine'}, {time.monotonic() - begin:.1f} s", file=file)
    if not errors.read_text():
        errors.unlink()
    return not ended


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


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the part's process, and what it has started and left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text_of(status: int) -> str:
    return f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"

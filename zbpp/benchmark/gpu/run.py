"""Runs one part: in a process of its own, or here.

    python -m zbpp.benchmark.gpu.run PART FILE SECONDS DEVICE [small]

The process writes each row to FILE as a line of JSON as soon as it is known. So the rows of a part that is
stopped, or that breaks the device, are kept.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from zbpp.benchmark.gpu.parts import PARTS, PartPlan
from zbpp.benchmark.gpu.rows import Outcome, Row
from zbpp.benchmark.gpu.settings import Settings
from zbpp.benchmark.interruption import Interrupted, Interruption

Say = Callable[[str], None]
_INTERVAL = 0.2  # s


def run_here(part: PartPlan, settings: Settings, say: Say, signals: Interruption | None = None) -> Outcome:
    """Run the part in this process. An error or a signal ends the part, and becomes the outcome's `why`."""
    outcome, begin = Outcome(part.name, part.title), time.monotonic()
    try:
        say("")
        for row in rows_of(part, settings):
            outcome.rows.append(row)
            say(row.what)
    except Exception as error:  # whatever a device or a compiler may raise
        outcome.why = first_line(error)
    except Interrupted as signal:
        outcome.why = f"ended by {signal}"
    outcome.seconds = time.monotonic() - begin
    return outcome


def run_apart(part: PartPlan, settings: Settings, say: Say, signals: Interruption | None = None) -> Outcome:
    """Run the part in a process of its own, which is ended after settings.seconds, or by a signal."""
    outcome, begin = Outcome(part.name, part.title), time.monotonic()
    process: subprocess.Popen[bytes] | None = None
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "rows", Path(folder) / "log"
        path.touch()
        try:
            say("")
            with log.open("wb") as output, (signals or Interruption()).held():
                process = subprocess.Popen(
                    _command(part, path, settings),
                    stdout=output,
                    stderr=output,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # so that what the part starts ends with it
                )
            status = _wait(process, path, begin + settings.seconds, say)
            if status is None:
                outcome.why = f"stopped after its {settings.seconds:.0f} s"
            elif status:
                outcome.why = f"ended with status {status}: {_last_line(log)}"
        except Interrupted as signal:
            outcome.why = f"ended by {signal}"
        finally:
            if process is not None:
                _end(process)
        outcome.rows = _read(path)
    outcome.seconds = time.monotonic() - begin
    return outcome


def rows_of(part: PartPlan, settings: Settings) -> Iterator[Row]:
    """The part's rows."""
    yield from importlib.import_module(part.module).rows(settings)


def first_line(error: BaseException) -> str:
    """`ValueError: what is wrong`, on one line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _command(part: PartPlan, path: Path, settings: Settings) -> list[str]:
    small = ["small"] if settings.is_small else []
    return [
        sys.executable,
        "-m",
        __name__,
        part.name,
        str(path),
        str(settings.seconds),
        settings.device,
        *small,
    ]


def _wait(process: subprocess.Popen[bytes], path: Path, end: float, say: Say) -> int | None:
    """The process's exit status; None if its time is over."""
    known = 0
    while process.poll() is None:
        if time.monotonic() > end:
            return None
        found = _read(path)
        if len(found) > known:
            known = len(found)
            say(found[-1].what)
        time.sleep(_INTERVAL)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: Path) -> list[Row]:
    """The rows that are whole."""
    lines = path.read_text().splitlines(keepends=True)
    return [Row(**json.loads(line)) for line in lines if line.endswith("\n")]


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _main(name: str, path: str, seconds: str, device: str, *small: str) -> None:
    """The process of one part."""
    part = next(each for each in PARTS if each.name == name)
    settings = Settings(device=device, is_small=bool(small), seconds=float(seconds))
    with Path(path).open("w") as file:
        try:
            for row in rows_of(part, settings):
                print(json.dumps(row.as_json()), file=file, flush=True)
        except Exception as error:
            import traceback

            traceback.print_exc()
            print(first_line(error), file=sys.stderr)  # the last line is shown
            sys.exit(1)


if __name__ == "__main__":
    _main(*sys.argv[1:])

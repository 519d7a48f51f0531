"""Ends a process whose program does not come back: an alarm, and an error where a launcher looks for it."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

_SHOWN = 4  # calls of a stack, the innermost ones
_OF_TORCH = os.path.dirname(torch.__file__)


def set_alarm(seconds: float) -> None:
    """Unless this is called again in time, show what each thread does, and end the process."""
    with suppress(AttributeError, ValueError, OSError):  # where standard error is no file
        number = sys.__stderr__.fileno()  # type: ignore[union-attr]
        faulthandler.dump_traceback_later(seconds, exit=True, file=number)


def cancel_alarm() -> None:
    """Let the process live, however long nothing is heard of it."""
    faulthandler.cancel_dump_traceback_later()


def report_end(why: str, stack: Sequence[str], pointer: str = "") -> None:
    """Tell the launcher, or else the user, why this process ends.

    stack: where the program's thread is. pointer: where the user finds more.
    """
    shown = [each for each in stack if _OF_TORCH not in each] or stack
    text = f"{why}:\n{''.join(shown[-_SHOWN:])}{pointer}"
    try:
        _write_for_torchrun(text, stack)
    except (OSError, KeyError):
        print(text, file=sys.stderr, flush=True)


def _write_for_torchrun(text: str, stack: Sequence[str]) -> None:
    """Leave the error where torchrun, and zbpp's own launcher, look for a rank's error."""
    more = {"py_callstack": "".join(stack), "timestamp": str(int(time.time()))}
    record = json.dumps({"message": {"message": text, "extraInfo": more}})
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(record)

"""The file that each rank leaves when a call has failed on any rank; `zbpp hang` reads these files."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from zbpp.error_text import first_cause, shown_path
from zbpp.runtime.flight_recorder import FlightRecorder
from zbpp.runtime.other_ranks import OtherRanks


class FailureRecord:
    """This rank's record: where it stood, where its program's code is, and what it knows of the others.

    Made by the thread that runs the program; any thread may write it.
    """

    def __init__(self, flight: FlightRecorder, others: OtherRanks) -> None:
        self._flight, self._others = flight, others
        self._program = threading.get_ident()
        self._error: list[str] = []  # the stack of this rank's error
        self.folder: Path | None = None
        self._title: dict[str, Any] = {}

    def leave_in(self, folder: Path, title: dict[str, Any]) -> None:
        """Write to this folder; by default nothing is written. title: entries that the file gets besides."""
        self.folder, self._title = folder, title

    @property
    def pointer(self) -> str:
        """The command that shows the records; "" if none is written."""
        command = "" if self.folder is None else f"zbpp hang {shown_path(self.folder)}"
        return command and f"`{command}` shows where each rank stood"

    def keep_stack(self, error: BaseException | None) -> None:
        """Keep where this rank's error began."""
        self._error = [] if error is None else _stack_of(error)

    def stack(self) -> list[str]:
        """Where the program's thread is, or was when its error was raised."""
        if self._error:
            return self._error
        frame = sys._current_frames().get(self._program)
        return [] if frame is None else traceback.format_stack(frame)

    def write(self, why: str, said: str) -> None:
        """Write the file. why: this rank's own error; said: what it says of the others."""
        if self.folder is None:
            return
        flight = self._flight
        others = [
            each
            for each in self._others.standings.values()
            if each.pipeline == flight.pipeline and each.process != flight.process
        ]
        record = {
            **self._title,
            **flight.record(),
            "why": why,
            "said": said,
            "others": [{**each._asdict(), "state": self._others.state(each.process)} for each in others],
            "stack": self.stack(),
        }
        with suppress(OSError):  # another error ends the job, and must not be hidden by this one
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"flight-rank-{flight.process}.json").write_text(json.dumps(record))


def _stack_of(error: BaseException) -> list[str]:
    """Where an error began, and the error."""
    first = first_cause(error)
    text = "".join(traceback.format_exception_only(error))  # with the notes, on lines of their own
    return [*traceback.format_tb(first.__traceback__), text]

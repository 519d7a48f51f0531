"""Rows of the table, and the journal on disk that a process leaves even if it is killed.

Each node's first process writes a journal: a line when a row begins, a line when it has ended. A row that has
begun and never ended is one in which the process died.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

OK, NOTE, SLOW, FAILED, NOT_RUN = "ok", "note", "SLOW", "FAILED", "not run"


class Row(NamedTuple):
    """One line of the table. found: in words. numbers: the figures in found, for the JSON."""

    part: str
    name: str
    outcome: str
    found: str
    numbers: dict[str, Any]


class Journal:
    """Writes the rows of one part; only on the first process of each node."""

    def __init__(self, folder: Path, part: str) -> None:
        self._path: Path | None = None
        if os.environ.get("LOCAL_RANK", "0") == "0":
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / f"rows-{socket.gethostname()}-{part}.jsonl"
            self._path.write_text("")

    def begin(self, part: str, name: str) -> None:
        """Note that the work for a row begins."""
        self._write({"begun": [part, name]})

    def end(self, row: Row) -> None:
        """Write the finished row."""
        self._write({"row": row._asdict()})

    def _write(self, entry: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def rows_in(folder: Path, logs: Mapping[str, str] | None = None, interrupted: str = "") -> list[Row]:
    """The rows of all journals, each once, in the order of the first journal that has it.

    A row without an end is FAILED: its processes ended while it ran; the row after it says that the rest
    did not run. logs: the log of a part, where it is not PART.log. interrupted: the signal that ended the
    check: then nothing failed.
    """
    found: dict[tuple[str, str], Row | None] = {}
    for path in sorted(folder.glob("rows-*.jsonl")):
        for key, row in _entries(path.read_text().splitlines()):
            if found.get(key) is None:
                found[key] = row

    def lost(part: str, name: str) -> list[Row]:
        log = (logs or {}).get(part, f"{part}.log")
        failed = Row(part, name, FAILED, f"the processes ended while this ran: see {log}", {})
        ended = Row(part, name, NOT_RUN, f"ended by {interrupted} while this ran", {})
        rest = Row(part, "(the rest)", NOT_RUN, f"what comes after {name}", {})
        return [ended if interrupted else failed, rest]

    return [each for key, row in found.items() for each in ([row] if row is not None else lost(*key))]


def _entries(lines: Iterable[str]) -> Iterable[tuple[tuple[str, str], Row | None]]:
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # a process was killed while it wrote
            continue
        if "row" in entry:
            row = Row(**entry["row"])
            yield (row.part, row.name), row
        else:
            part, name = entry["begun"]
            yield (part, name), None

"""Timetables in forms that others read and write, and in files: torch's CSV, JSON, text.

CSV as in `torch.distributed.pipelining`, one line per rank, one action per cell, empty cells where
a rank idles (`_dump_csv`, and `_load_csv` of `_PipelineScheduleRuntime`, which executes it):

    0F0,0F1,,0I0,0W0,0B1
    ,1F0,1I0,1F1,1I1,1W0,1W1

Its letters are others than ours:

|            | forward | gradient of the input | gradients of the weights | both in one piece |
|------------|---------|-----------------------|--------------------------|-------------------|
| timetable  | F       | B                     | W                        | BW                |
| torch      | F       | I                     | W                        | B                 |

JSON is one object; each row is a line of the timetable's own text. `format` and `rows` are enough;
the other entries are there for readers, and must agree with the rows:

    {"format": "zbpp timetable 1", "num_ranks": 2, "num_stages": 2, "num_microbatches": 1,
     "rank_of": [0, 1], "rows": ["0F0 0BW0", "1F0 1B0 1W0"]}

No text here ends with a line break: torch takes an empty line for one more rank.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Op, PlanError, Timetable, printable, read_rows, shown

_OP_OF = {"F": Op.F, "I": Op.B, "W": Op.W, "B": Op.BW}
_LETTER_OF = {op: letter for letter, op in _OP_OF.items()}

_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_NO_COMPUTATION = re.compile(
    r"\d+(?:(?:(?:WAIT_)?SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)", re.ASCII
)

_FORMAT = "zbpp timetable 1"


def to_csv(timetable: Timetable) -> str:
    """The CSV that torch's `_PipelineScheduleRuntime` loads as "compute_only"."""
    return "\n".join(
        ",".join(f"{stage}{_LETTER_OF[op]}{microbatch}" for stage, op, microbatch in row)
        for row in timetable.rows
    )


def from_csv(text: str) -> Timetable:
    """Read `to_csv`'s text and what torch dumps, "compute_only" or "compute_comms".

    OVERLAP_F_B becomes its two actions in their order, as torch's runtime executes it. Sends, receives,
    waits for sends, unsharding and gradient reduction are left out: a timetable implies them. Blank lines
    are nothing. Raises PlanError with line and cell.
    """
    lines = [(number, list(_words(cells))) for number, cells in _read_csv(text) if cells]
    for number, words in lines:
        if not words:
            raise PlanError(f"line {number} has no actions; every rank owns at least one stage")

    def where(rank: int, position: int) -> str:
        number, words = lines[rank]
        return f"line {number}, cell {words[position][0]}"

    return read_rows([[word for _, word in words] for _, words in lines], where, _OP_OF)


def to_json(timetable: Timetable) -> str:
    """The timetable as a JSON object, one row per line."""
    rows = [str(row) for row in timetable.rows]
    return json.dumps({"format": _FORMAT, **_summary(timetable), "rows": rows}, indent=2)


def from_json(text: str) -> Timetable:
    """Read `to_json`'s text. Raises PlanError with line and column, or row and word."""
    given = read_json(text)
    if not isinstance(given, dict) or given.get("format") != _FORMAT:
        found = given.get("format") if isinstance(given, dict) else given
        raise PlanError(f'a JSON object with "format": "{_FORMAT}" is expected, not {shown(found)}')
    rows = _rows(given.get("rows"))
    timetable = read_rows(
        [row.split() for row in rows], where=lambda rank, position: f"rows[{rank}], word {position + 1}"
    )
    for name, implied in _summary(timetable).items():
        if given.get(name, implied) != implied:
            raise PlanError(f'"{name}" is {shown(given[name])}, but the rows say {shown(implied)}')
    return timetable


def _rows(given: object) -> list[str]:
    if not isinstance(given, list):
        raise PlanError(f'"rows" is {shown(given)}; a list of texts, one per rank, is expected')
    for rank, row in enumerate(given):
        if not isinstance(row, str) or not row.strip():
            raise PlanError(f'rows[{rank}] is {shown(row)}; a text such as "0F0 0BW0" is expected')
    return given


def _read_csv(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each record."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise PlanError(f"line {reader.line_num} is no CSV: {error}") from None


def _words(cells: list[str]) -> Iterator[tuple[int, str]]:
    """(cell, action) of each action in a line of torch's."""
    for number, cell in enumerate(map(str.strip, cells), 1):
        if pair := _PAIR.fullmatch(cell):
            yield from ((number, word.strip()) for word in pair[1].split(";"))
        elif cell and not _NO_COMPUTATION.fullmatch(cell):
            yield number, cell


def _summary(timetable: Timetable) -> dict[str, object]:
    return {
        "num_ranks": timetable.num_ranks,
        "num_stages": timetable.num_stages,
        "num_microbatches": timetable.num_microbatches,
        "rank_of": list(timetable.rank_of),
    }


def read_json(text: str | bytes) -> object:
    """What a JSON text holds. Raises PlanError for anything else, and for what is nested too deep."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"line {error.lineno}, column {error.colno} is no JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"no JSON that can be read: byte {error.start} is no UTF-8 text") from None
    except RecursionError:
        raise PlanError("no JSON that can be read: it is nested too deep") from None
    except ValueError:  # Python's guard of int()
        raise PlanError("no JSON that can be read: a number has too many digits") from None


def read_timetable(path: str | os.PathLike[str]) -> Timetable:
    """The timetable in a file: .csv as torch writes it, .json as `to_json` does, any other as text.

    Raises OSError, and PlanError that names the file and the place in it, or why the timetable can't run.
    """
    with naming(path):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PlanError(f"byte {error.start} is no UTF-8 text") from None
        timetable = {".csv": from_csv, ".json": from_json}.get(Path(path).suffix, Timetable.parse)(text)
        simulate(timetable)
        return timetable


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """A PlanError from here on begins with the file's name."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{printable(os.fspath(path))}: {error}") from None

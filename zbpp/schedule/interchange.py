"""Timetables in files: as text, and as the CSV of `torch.distributed.pipelining`.

The CSV has one line per rank and one action per cell; a cell is empty where the rank idles. torch writes
it with `_dump_csv`, reads it with `_load_csv`, and executes it in `_PipelineScheduleRuntime`:

    0F0,0F1,,0I0,0W0,0B1
    ,1F0,1I0,1F1,1I1,1W0,1W1

The letters differ, and B means two things:

| op                             | timetable | torch |
|--------------------------------|-----------|-------|
| forward                        | F         | F     |
| gradient of the stage's input  | B         | I     |
| gradients of its weights       | W         | W     |
| both gradients in one piece    | BW        | B     |

The CSV does not end with a line break: torch would take the empty line for one more rank.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Op, PlanError, Timetable, printable, read_rows

_OP_OF = {"F": Op.F, "I": Op.B, "W": Op.W, "B": Op.BW}
_LETTER_OF = {op: letter for letter, op in _OP_OF.items()}

_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_NO_COMPUTATION = re.compile(
    r"\d+(?:(?:(?:WAIT_)?SEND|RECV)_[FB]\d+|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)", re.ASCII
)


def to_csv(timetable: Timetable) -> str:
    """The CSV that torch's `_PipelineScheduleRuntime` loads as "compute_only"."""
    return "\n".join(
        ",".join(f"{stage}{_LETTER_OF[op]}{microbatch}" for stage, op, microbatch in row)
        for row in timetable.rows
    )


def from_csv(text: str) -> Timetable:
    """Read `to_csv`'s text and what torch dumps, "compute_only" or "compute_comms".

    An OVERLAP_F_B cell becomes its two actions in their order, as torch's runtime executes it. Sends,
    receives and waits for sends are left out, since `lower` makes them. Unsharding and gradient reduction are
    left out, since they belong to data parallelism. Blank lines are skipped. Raises PlanError with line and
    cell.
    """
    lines = [(number, list(_words(cells))) for number, cells in _read_csv(text) if cells]
    for number, words in lines:
        if not words:
            raise PlanError(f"line {number} has no actions; every rank owns at least one stage")

    def where(rank: int, position: int) -> str:
        number, words = lines[rank]
        return f"line {number}, cell {words[position][0]}"

    return read_rows([[word for _, word in words] for _, words in lines], where, _OP_OF)


def _read_csv(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the line, its cells) for each line."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise PlanError(f"line {reader.line_num} is no CSV: {error}") from None


def _words(cells: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (number of the cell, action) for each action in a line of torch's CSV."""
    for number, cell in enumerate(map(str.strip, cells), 1):
        if pair := _PAIR.fullmatch(cell):
            yield from ((number, word.strip()) for word in pair[1].split(";"))
        elif cell and not _NO_COMPUTATION.fullmatch(cell):
            yield number, cell


def read_timetable(path: str | os.PathLike[str]) -> Timetable:
    """Read the timetable in a file: .csv as torch writes it, any other as the timetable's own text.

    Raises OSError, and PlanError that names the file and the place in it, or why the timetable can't run.
    """
    with naming(path):
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PlanError(f"not UTF-8 text, at byte {error.start}") from None
        timetable = from_csv(text) if Path(path).suffix == ".csv" else Timetable.parse(text)
        simulate(timetable)
        return timetable


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the file's name in front of a PlanError that is raised inside."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{printable(os.fspath(path))}: {error}") from None

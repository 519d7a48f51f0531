"""Documents from files, in units of work: text files, jsonl, Hugging Face datasets on disk.

A unit is some files, a range of bytes of a jsonl file, or a range of rows of a dataset. Units depend on the
sources only, not on the number of processes that work on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbpp.data.corpus import check_text, find_files

UNIT_BYTES = 2**23
UNIT_ROWS = 5000
TEXT, JSONL, DATASET = "text", "jsonl", "dataset"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How documents are read.

    field: the key of the text in a jsonl line, or its column in a dataset. split: of a dataset with several.
    pattern: of the file names in a folder. separator: the text between two documents of a text file; None: a
    file is one document.
    """

    field: str = "text"
    split: str | None = None
    pattern: str | None = None
    separator: str | None = None


@dataclass(frozen=True)
class Unit:
    """A unit of work. files: the paths of text files, of one jsonl file, or of one dataset's folder.

    start, stop: the range of bytes in a jsonl file, or of rows in a dataset; 0 for text files. size: in
    bytes; of a dataset the number of rows times the mean size of a row.
    """

    kind: str
    files: tuple[str, ...]
    start: int
    stop: int
    size: int


def units_of(sources: Sequence[Path], reading: Reading) -> list[Unit]:
    """The sources cut into units. Raises FileNotFoundError; ValueError for sources without documents."""
    found = [unit for source in sources for unit in _units_of(Path(source).expanduser(), reading)]
    if not found:
        raise ValueError("the sources hold no documents: name text files, jsonl files or datasets with some")
    return found


def _units_of(source: Path, reading: Reading) -> list[Unit]:
    if not source.exists():
        raise FileNotFoundError(
            f"{str(source)!r} does not exist (looked from {Path.cwd()}): name a text file, a .jsonl file, a "
            "folder of them, or a folder that datasets.save_to_disk wrote"
        )
    if source.is_dir() and any((source / name).exists() for name in ("state.json", "dataset_dict.json")):
        return _dataset_units(source, reading)
    pattern = reading.pattern or "*.txt"
    files = [source] if source.is_file() else find_files(source, pattern)
    texts = [file for file in files if file.suffix != ".jsonl"]
    lines = [file for file in files if file.suffix == ".jsonl"]
    return [*_text_units(texts), *(unit for file in lines for unit in _line_units(file))]


def _text_units(files: Sequence[Path]) -> Iterator[Unit]:
    """Units of neighbouring files, of UNIT_BYTES or a little more each."""
    taken: list[str] = []
    size = 0
    for file in files:
        taken.append(str(file))
        size += file.stat().st_size
        if size >= UNIT_BYTES:
            yield Unit(TEXT, tuple(taken), 0, 0, size)
            taken, size = [], 0
    if taken:
        yield Unit(TEXT, tuple(taken), 0, 0, size)


def _line_units(file: Path) -> Iterator[Unit]:
    size = file.stat().st_size
    for start in range(0, size, UNIT_BYTES):
        stop = min(start + UNIT_BYTES, size)
        yield Unit(JSONL, (str(file),), start, stop, stop - start)


def _dataset_units(folder: Path, reading: Reading) -> list[Unit]:
    rows = len(_dataset(str(folder), reading))
    each = sum(file.stat().st_size for file in folder.rglob("*.arrow")) // max(1, rows)
    starts = range(0, rows, UNIT_ROWS)
    stops = [min(start + UNIT_ROWS, rows) for start in starts]
    return [
        Unit(DATASET, (str(folder),), start, stop, (stop - start) * each)
        for start, stop in zip(starts, stops, strict=True)
    ]


def documents_of(unit: Unit, reading: Reading) -> Iterator[str]:
    """The documents of a unit, without empty ones. Raises ValueError for a file or field that is no text."""
    read = {TEXT: _texts, JSONL: _lines, DATASET: _rows}[unit.kind]
    return (document for document in read(unit, reading) if document)


def _texts(unit: Unit, reading: Reading) -> Iterator[str]:
    for name in unit.files:
        content = Path(name).read_bytes()
        check_text(Path(name), content)
        text = content.decode("utf-8", errors="surrogateescape")
        yield from [text] if reading.separator is None else text.split(reading.separator)


def _lines(unit: Unit, reading: Reading) -> Iterator[str]:
    """The documents in the lines that begin in the unit's range; the last one may end after it."""
    (name,) = unit.files
    with open(name, "rb") as file:
        if unit.start:
            file.seek(unit.start - 1)
            file.readline()  # the rest of the line that begins before the range, or only its line break
        while (position := file.tell()) < unit.stop:
            line = file.readline()
            if line.strip():
                yield _field_of_line(line, f"{name!r}, the line at byte {position}", reading.field)


def _field_of_line(line: bytes, where: str, field: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}, is no JSON ({error}): write one object a line") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}, is a {type(found).__name__}: write one object a line")
    return _text_in(found, where, field)


def _text_in(row: dict[str, Any], where: str, field: str) -> str:
    text = row.get(field)
    if not isinstance(text, str):
        held = f"holds a {type(text).__name__}" if field in row else "is missing"
        texts = ", ".join(name for name, value in row.items() if isinstance(value, str)) or "none"
        raise ValueError(f"{where}: {field!r} {held}; fields with text: {texts}; write --field NAME")
    return text


def _rows(unit: Unit, reading: Reading) -> Iterator[str]:
    (folder,) = unit.files
    rows = _dataset(folder, reading).select(range(unit.start, unit.stop))
    for number, row in enumerate(rows, start=unit.start):
        yield _text_in(row, f"{folder!r}, row {number}", reading.field)


def _dataset(folder: str, reading: Reading) -> Any:
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise ValueError(
            f"{folder!r} is a Hugging Face dataset, and the package `datasets` is not installed: run "
            "`pip install zbpp[hf]`"
        ) from error
    found = load_from_disk(folder)
    if isinstance(found, DatasetDict):
        if reading.split not in found:
            given = "no split is named" if reading.split is None else f"there is no split {reading.split!r}"
            raise ValueError(f"{folder!r}: {given}; write --split with one of {', '.join(found)}")
        found = found[reading.split]
    columns = found.column_names
    if reading.field not in columns:
        raise ValueError(
            f"{folder!r} has no column {reading.field!r}: write --field with one of {', '.join(columns)}"
        )
    return found.select_columns([reading.field])

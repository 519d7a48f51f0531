"""The rows of all parts as one table and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from zbpp.benchmark.cluster.hang_verdict import verdict
from zbpp.benchmark.cluster.rows import FAILED, NOT_RUN, SLOW, Row, rows_in
from zbpp.benchmark.cluster.settings import PARTS

TEXT, JSON = "cluster.txt", "cluster.json"
_WIDEST = 220  # characters of what was found; the JSON has all of it


def report(out: Path) -> tuple[str, bool]:
    """(the table, whether nothing failed); writes both files into the folder."""
    rows = collected(out)
    text = table(rows)
    (out / TEXT).write_text(text + "\n")
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    (out / JSON).write_text(
        json.dumps({"when": when, "rows": [row._asdict() for row in rows]}, indent=2) + "\n"
    )
    return text, all(row.outcome != FAILED for row in rows)


def collected(out: Path) -> list[Row]:
    """The rows in the order of the parts; a part without any gets one that says so."""
    rows = rows_in(out)
    hang = verdict(out)
    rows += [hang] if hang is not None else []
    wanted = _wanted(out)
    for part in wanted:
        if not any(row.part == part for row in rows):
            rows.append(Row(part, "(start)", FAILED, f"the job of this part never began: see {part}.log", {}))
    return sorted(rows, key=lambda row: PARTS.index(row.part))


def _wanted(out: Path) -> list[str]:
    path = out / "parts"
    return [each for each in path.read_text().split() if each in PARTS] if path.is_file() else []


def table(rows: Sequence[Row]) -> str:
    """Aligned text, with a last line that counts what needs a look."""
    cells = [("part", "row", "outcome", "found")]
    cells += [(row.part, row.name, row.outcome, shorten(row.found, _WIDEST)) for row in rows]
    widths = [max(len(line[place]) for line in cells) for place in range(3)]
    lines = [
        "  ".join(
            [*(f"{text:{width}}" for text, width in zip(line[:3], widths, strict=True)), line[3]]
        ).rstrip()
        for line in cells
    ]
    return "\n".join([*lines, summary(rows)])


def summary(rows: Sequence[Row]) -> str:
    """`24 rows: 1 FAILED (mesh ...), 2 SLOW`."""
    failed = [f"{row.part} {row.name}" for row in rows if row.outcome == FAILED]
    slow = sum(row.outcome == SLOW for row in rows)
    left = sum(row.outcome == NOT_RUN for row in rows)
    said = f"{len(failed)} FAILED ({'; '.join(failed[:5])})" if failed else "none failed"
    return f"{len(rows)} rows: {said}, {slow} SLOW, {left} not run"

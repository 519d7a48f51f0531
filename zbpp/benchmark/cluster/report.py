"""The rows of all parts as one table and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten

from zbpp.benchmark.cluster.hang_verdict import verdict
from zbpp.benchmark.cluster.rows import FAILED, NOT_RUN, SLOW, Row, rows_in
from zbpp.benchmark.cluster.settings import PARTS, WANTED

TEXT, JSON = "cluster.txt", "cluster.json"
_WIDEST = 220  # characters of what was found; the JSON has all of it


def report(out: Path, early: Mapping[str, Row] | None = None, interrupted: str = "") -> tuple[str, bool, str]:
    """(the table, whether nothing failed, why the files could not be written or ""); writes both files.

    early: rows of parts that did not run, by part. interrupted: the signal that ended the check, or "".
    """
    rows = collected(out, early or {}, interrupted)
    text = table(rows)
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    found = json.dumps({"when": when, "rows": [row._asdict() for row in rows]}, indent=2)
    problem = ""
    try:
        (out / TEXT).write_text(text + "\n")
        (out / JSON).write_text(found + "\n")
    except OSError as error:  # the table is printed in any case
        problem = f"the files of the table could not be written: {error}"
    return text, all(row.outcome != FAILED for row in rows), problem


def collected(out: Path, early: Mapping[str, Row] | None = None, interrupted: str = "") -> list[Row]:
    """The rows in the order of the parts; a part without any gets one that says so. See `report`."""
    jobs = _jobs(out)
    logs = {part: f"{job[0]}.log" for job in jobs for part in job}
    rows = rows_in(out, logs, interrupted)
    hang = verdict(out, interrupted)
    rows += [hang] if hang is not None else []
    for part in logs:
        if not any(row.part == part for row in rows):
            rows.append((early or {}).get(part) or _without_rows(part, logs[part], interrupted))
    return sorted(rows, key=lambda row: PARTS.index(row.part))


def _jobs(out: Path) -> list[list[str]]:
    """The parts that were asked for, those of one job together."""
    path = out / WANTED
    lines = path.read_text().splitlines() if path.is_file() else []
    jobs = [[part for part in line.split() if part in PARTS] for line in lines]
    return [job for job in jobs if job]


def _without_rows(part: str, log: str, interrupted: str) -> Row:
    if interrupted:
        return Row(part, "(start)", NOT_RUN, f"ended by {interrupted} before this part", {})
    when = "its first row" if log == f"{part}.log" else "this part"
    return Row(part, "(start)", FAILED, f"the job ended before {when}: see {log}", {})


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

"""A check's findings as text, as JSON and as a page of Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from zbpp.benchmark.gpu.check import Report
from zbpp.benchmark.gpu.marks import Verdict
from zbpp.benchmark.gpu.rows import Outcome, Row

Table = tuple[list[str], list[list[str]]]  # head, rows


def write(report: Report, folder: Path, name: str) -> list[Path]:
    """Write gpu_NAME.txt, .json and .md; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"txt": as_text(report), "json": as_json(report), "md": as_page(report)}
    paths = []
    for ending, text in texts.items():
        paths.append(folder / f"gpu_{name}.{ending}")
        paths[-1].write_text(text)
    return paths


def as_json(report: Report) -> str:
    """Everything."""
    found = {
        "machine": report.machine,
        "settings": report.settings,
        "marks": [each.as_json() for each in report.verdicts],
        "parts": [each.as_json() for each in report.outcomes],
    }
    return json.dumps(found, indent=2) + "\n"


def as_text(report: Report) -> str:
    """Tables for a terminal."""
    lines = [_title(report), ""]
    lines += ["Marks", *_aligned(_marks(report.verdicts)), ""]
    for outcome in report.outcomes:
        lines += [_heading(outcome), *_remarks(outcome)]
        for table in _tables(outcome):
            lines += [*_aligned(table), ""]
        if lines[-1]:
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def as_page(report: Report) -> str:
    """The same as Markdown."""
    facts = ", ".join(f"{name} {value}" for name, value in report.machine.items() if value not in ("", None))
    lines = ["# zbpp on one GPU", "", _title(report), "", facts, ""]
    lines += ["## Marks", "", *_markdown(_marks(report.verdicts)), ""]
    for outcome in report.outcomes:
        lines += [f"## {_heading(outcome)}", "", *[f"- {each}" for each in _remarks(outcome)], ""]
        for table in _tables(outcome):
            lines += [*_markdown(table), ""]
    return "\n".join(lines).rstrip() + "\n"


def _title(report: Report) -> str:
    facts = report.machine
    small = "; the small form" if report.settings["small"] else ""
    cuda = f", CUDA {facts['cuda']}" if "cuda" in facts else ""
    versions = f"torch {facts['torch']}{cuda}, Python {facts['python']}"
    return f"{facts['device']}; {versions}; {facts['date']}{small}"


def _heading(outcome: Outcome) -> str:
    return f"{outcome.title} ({outcome.name}, {outcome.seconds:.0f} s)"


def _remarks(outcome: Outcome) -> list[str]:
    """Rows without numbers, and why the part ended early."""
    found = [" ".join(filter(None, [row.what, row.note])) for row in outcome.rows if not row.values]
    return [*found, *([f"NOT COMPLETE: {outcome.why}"] if outcome.why else [])]


def _marks(verdicts: Sequence[Verdict]) -> Table:
    body = []
    for each in verdicts:
        noise = f" ± {each.noise:.2f}" if each.noise else ""
        value = "" if each.value is None else f"{each.value:.2f}{noise}"
        body.append([each.mark.text, f"<= {each.mark.limit:.2f}", value, each.verdict, each.why])
    return ["mark", "limit", "found", "verdict", ""], body


def _tables(outcome: Outcome) -> Iterator[Table]:
    """Rows that share a column stand in one table with the row before them."""
    together: list[list[Row]] = []
    columns: set[str] = set()
    for row in (each for each in outcome.rows if each.values):
        if not columns & row.values.keys():
            together.append([])
            columns = set()
        together[-1].append(row)
        columns |= row.values.keys()
    for rows in together:
        names = [*dict.fromkeys(name for row in rows for name in row.values)]
        yield ["", *names, ""], [[row.what, *_cells(row, names), row.note] for row in rows]


def _cells(row: Row, columns: Sequence[str]) -> list[str]:
    return [f"{row.values[name]:{row.form}}" if name in row.values else "–" for name in columns]


def _aligned(table: Table) -> list[str]:
    """Columns of equal width; numbers to the right."""
    head, body = table
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if place in (0, len(head) - 1) else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *body)
    ]


def _markdown(table: Table) -> list[str]:
    head, body = table
    lines = [head, ["---" if place == 0 else "---:" for place in range(len(head))], *body]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]

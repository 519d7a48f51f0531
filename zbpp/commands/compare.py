"""Compare finished runs: are their losses equal to the last bit, and what did each run measure?

    zbpp compare runs/demo/1f1b runs/demo/zb_h1
    zbpp compare runs/demo/zb_h1 --picture curves.png

The second line draws loss, speed, bubble and memory over the steps; one run is enough for that. The exit
status is 1 if the losses differ in any bit, 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zbpp.schedule.timetable import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `zbpp compare`; the exit status."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="zbpp compare", description=__doc__, formatter_class=layout, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders of zbpp train")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the runs: .png, .svg or .pdf")
    given = parser.parse_args(arguments)
    folders, picture = given.runs, given.picture
    for folder in folders:
        if not folder.exists():
            is_pattern = set("*?[") & set(str(folder))
            parser.exit(2, f"error: {'nothing matches' if is_pattern else 'there is no folder'} {folder}\n")
    if len(folders) < 2 and picture is None:
        parser.exit(
            2, f"error: {folders[0]} is one run: name two run folders or more to compare, or --picture FILE\n"
        )
    for folder in folders:
        if not (folder / "summary.json").is_file():
            parser.exit(
                2, f"error: {folder} holds no summary.json: name the run_dir of a finished zbpp train\n"
            )
    try:
        status = _compare(folders)
        if picture is not None:
            _draw(folders, picture)
        return status
    except (LookupError, AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        why = printable(f"{type(error).__name__}: {error}"[:200])
        parser.exit(2, f"error: the files of these folders are not those of finished runs ({why})\n")


def _draw(folders: list[Path], picture: Path) -> None:
    from zbpp.render import render_curves  # matplotlib takes a second

    runs = {str(folder): _lines(folder) for folder in folders}
    render_curves(runs, picture)
    print(f"drawn to {picture}")


def _compare(folders: list[Path]) -> int:
    losses = [[line["loss"] for line in _lines(folder) if "loss" in line] for folder in folders]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    print("\n".join(map(printable, [*_conditions(summaries), *_table(folders, summaries).splitlines()])))
    if len(folders) == 1:
        return 0
    are_equal = all(each == losses[0] for each in losses)
    outcome = "are equal to the last bit" if are_equal else f"DIFFER{_difference(losses)}"
    print(f"losses of all {len(losses[0])} steps {outcome}")
    return 0 if are_equal else 1


# What decides how numbers are rounded, by the keys of summary.json.
_CONDITIONS = ("threads", "device", "precision", "torch", "python")


def _conditions(summaries: list[dict[str, Any]]) -> list[str]:
    """A line for each condition that differs between the runs."""
    told = {key: [str(each[key]) for each in summaries if key in each] for key in _CONDITIONS}
    return [
        f"the runs differ in {key}, so their losses may: {', '.join(values)}"
        for key, values in told.items()
        if len(set(values)) > 1
    ]


def _table(folders: list[Path], summaries: list[dict[str, Any]]) -> str:
    """A row per run, called by its folder."""
    head = (
        "run", "schedule", "last loss", "held-out", "speed", "bubble: predicted", "measured", "measured in",
    )  # fmt: skip
    rows = [head, *(_row(folder, summary) for folder, summary in zip(folders, summaries, strict=True))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(folder: Path, summary: dict[str, Any]) -> tuple[str, ...]:
    first, held_out = summary.get("replanned_from"), summary.get("evaluation_loss")
    unit = "tokens" if "tokens_per_second" in summary else "rows"
    return (
        str(folder),
        f"{summary['schedule']} (began as {first})" if first else summary["schedule"],
        "-" if summary["loss"] is None else f"{float(summary['loss']):.16g}",
        "-" if held_out is None else f"{float(held_out):.4f}",
        f"{summary[f'{unit}_per_second']:,.0f} {unit}/s",
        f"{100 * summary['predicted_bubble_rate']:.1f} %",
        f"{100 * summary['measured_bubble_rate']:.1f} %",
        ", ".join(filter(None, [summary.get("measured_steps", "-"), summary.get("sharing")])),
    )


def _lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics of all steps. A number that was not finite is "NaN", "Infinity" or "-Infinity"."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _difference(losses: list[list[Any]]) -> str:
    """Where the losses of runs differ first, and by how much at most; or the runs' different lengths."""
    if len({len(each) for each in losses}) > 1:
        return f": the runs have {' and '.join(str(len(each)) for each in losses)} steps"
    steps = list(zip(*losses, strict=True))
    first = next(number for number, step in enumerate(steps, 1) if len(set(step)) > 1)
    if any(loss is None or not math.isfinite(float(loss)) for step in steps for loss in step):
        return f", first in step {first}"
    largest = max((max(step) - min(step)) / (abs(step[0]) or 1.0) for step in steps)
    return f", first in step {first}; the largest difference is {largest:.1e} of a loss"

"""The results of a benchmark: rows of numbers, a table for people, files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from zbpp.benchmark.interleaved_timing import TimedRunner
from zbpp.render import chrome_trace, render_picture
from zbpp.schedule import Timeline

Row = dict[str, Any]


def rows_of(timed: Sequence[TimedRunner], items_per_batch: float, unit: str = "tokens") -> list[Row]:
    """A row per runner, in values that JSON can write. unit: what the items are, "tokens" or "rows"."""
    return [_row(each, items_per_batch, unit) for each in timed]


def _row(timed: TimedRunner, items_per_batch: float, unit: str) -> Row:
    row: Row = {
        "schedule": timed.name,
        "runtime": timed.runtime,
        "stages_per_rank": timed.timetable.num_stages // timed.timetable.num_ranks,
        "unit": unit,
        "failure": timed.failure,
    }
    if timed.runner is None:
        return row
    predicted, measured, costs = timed.predicted, timed.typical, timed.costs
    return row | {
        "costs_ms": {name: getattr(costs, name) for name in ("f", "b", "w", "bw", "comm")},
        "step_ms": timed.step_time,
        "steps_ms": timed.wall_times,
        "makespan_ms": measured.makespan,
        "predicted_makespan_ms": predicted and predicted.makespan,
        "ratio": predicted and measured.makespan / predicted.makespan,
        "measured_bubble_rate": measured.bubble_rate,
        "predicted_bubble_rate": predicted and predicted.bubble_rate,
        "peak_memory_bytes": timed.peak_bytes,
        f"{unit}_per_second": items_per_batch / timed.step_time * 1e3,
    }


_HEAD = (
    "schedule", "runtime", "stages/rank", "step", "makespan", "predicted", "ratio", "bubble",
    "predicted bubble",
)  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Aligned text: times in ms, bubble rates, the largest peak of a rank where it was measured."""
    memory = ("peak memory",) if any(map(_peak, rows)) else ()
    head = (*_HEAD, *memory, f"{rows[0]['unit']}/s") if rows else _HEAD
    cells = [head, *(_cells(row, len(head)) for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(head))]
    lines = [
        "  ".join(f"{text:{'<' if place < 2 else '>'}{widths[place]}}" for place, text in enumerate(line))
        for line in cells
    ]
    failures = ["", *(shorten(row["failure"], 100) for row in rows)]
    shown = [f"{line}  {failure}".rstrip() for line, failure in zip(lines, failures, strict=True)]
    return "\n".join(shown)


def _cells(row: Row, number: int) -> tuple[str, ...]:
    name = row["schedule"] if row["runtime"] == "zbpp" else ""
    who = (name, row["runtime"], str(row["stages_per_rank"]))
    if row["failure"]:
        return (*who, *["-"] * (number - len(who)))
    peak = _peak(row)
    return (
        *who,
        f"{row['step_ms']:.1f}",
        f"{row['makespan_ms']:.1f}",
        _or_dash(row["predicted_makespan_ms"], ".1f"),
        _or_dash(row["ratio"], ".3f"),
        f"{row['measured_bubble_rate']:.3f}",
        _or_dash(row["predicted_bubble_rate"], ".3f"),
        *([_bytes(peak)] if peak else []),
        f"{row[row['unit'] + '_per_second']:.0f}",
    )


def _bytes(number: float) -> str:
    power = next((each for each in (30, 20) if number >= 2**each), 10)
    return f"{number / 2**power:.1f} {'KMG'[power // 10 - 1]}iB"


def _or_dash(number: float | None, form: str) -> str:
    return "-" if number is None else f"{number:{form}}"


def speed_comparisons(rows: Sequence[Row]) -> list[str]:
    """Lines on how much faster zbpp is than torch: per schedule, the best of each, the best in 1F1B's memory.

    Two amounts of memory are equal if the table prints them alike.
    """
    ran = [row for row in rows if not row["failure"]]
    ours = {_cut(row): row for row in ran if row["runtime"] == "zbpp"}
    theirs = {_cut(row): row for row in ran if row["runtime"] == "torch"}
    if not theirs:
        return []
    same = ", ".join(f"{row['schedule']} {_speed(ours[cut], row)}" for cut, row in theirs.items())
    best, their_best = min(ours.values(), key=_step_ms), min(theirs.values(), key=_step_ms)
    lines = [
        f"zbpp's speed over torch's, same schedule: {same}",
        f"zbpp's best ({best['schedule']}) over torch's best ({their_best['schedule']}): "
        f"{_speed(best, their_best)}",
    ]
    one = theirs.get(("1f1b", 1))
    if one is None or not _peak(one):
        return lines
    return [*lines, *_in_the_memory_of(one, ours.values(), their_best)]


def _in_the_memory_of(one: Row, ours: Iterable[Row], their_best: Row) -> list[str]:
    """Lines on zbpp's best schedule among those that need no more memory than torch's 1F1B.

    They say how much faster it is than that 1F1B, and than torch's best schedule.
    """
    memory = _bytes(_peak(one))
    fitting = [row for row in ours if _peak(row) <= _peak(one) or _bytes(_peak(row)) == memory]
    if not fitting:
        return [f"none of zbpp's fits into the {memory} of torch's 1f1b"]
    best = min(fitting, key=_step_ms)
    who = f"zbpp's best in the {memory} of torch's 1f1b ({best['schedule']})"
    their_memory = _bytes(_peak(their_best))
    return [
        f"{who} over torch's 1f1b: {_speed(best, one)}",
        f"{who} over torch's best ({their_best['schedule']}, {their_memory}): {_speed(best, their_best)}",
    ]


def _peak(row: Row) -> int:
    """The largest peak of a rank; 0 if there is none: for a runner that failed, and for emulated stages."""
    return int(max(row.get("peak_memory_bytes", ()), default=0))


def _cut(row: Row) -> tuple[str, int]:
    return row["schedule"], row["stages_per_rank"]


def _step_ms(row: Row) -> float:
    return float(row["step_ms"])


def _speed(ours: Row, theirs: Row) -> str:
    return f"{_step_ms(theirs) / _step_ms(ours):.3f}x"


def write(folder: Path, about: Row, timed: Sequence[TimedRunner], rows: Sequence[Row]) -> None:
    """Write bench.json, bench.png, and trace.json for Perfetto into a folder that exists."""
    results = {"about": about, "rows": rows, "verdicts": speed_comparisons(rows)}
    (folder / "bench.json").write_text(json.dumps(results, indent=2) + "\n")
    panels = [
        (f"{each.name}, {each.runtime}: measured", _with_own_peak(each))
        for each in timed
        if each.runner is not None
    ]
    render_picture(panels, folder / "bench.png")
    (folder / "trace.json").write_text(json.dumps(chrome_trace(panels)))


def _with_own_peak(timed: TimedRunner) -> Timeline:
    """The typical timeline with the runner's own peaks, as in the table.

    A measured timeline has the peaks of the process, which all runners share.
    """
    if not timed.peak_bytes:
        return timed.typical
    peaks = tuple(map(float, timed.peak_bytes))
    return replace(timed.typical, peak_memory=peaks, memory_unit="bytes", measured=False)


def describe(about: Row) -> str:
    """Lines on the sizes and the model, on the machine, and on what the table's columns mean."""
    kind = "EMULATED: stages sleep instead of computing" if about["emulated"] else "real compute"
    memory = "" if about["emulated"] else "; peak memory: of the rank that needs most, weights included"
    sizes = f"{about['num_ranks']} ranks, {about['num_microbatches']} microbatches"
    return (
        f"{sizes}, {about['model']} ({kind})\n"
        f"{about['device']}, torch {about['torch']}, load {about['load_average']:.1f}; median of "
        f"{about['repeats']} interleaved steps\n"
        "step: from the first rank's call to the last rank's return, ms; makespan: from the first action's "
        "start to the last one's end, ms, as in the picture; predicted: simulated with the measured costs\n"
        f"bubble: idle share of the rank that idles most{memory}"
    )

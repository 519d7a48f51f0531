"""The staircase: a timeline drawn to scale in text, one line per rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from zbpp.render.style import MEANING, first_start, index_on_rank
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import Op, Timetable

_B_BEFORE_W = "|"
_HAS_NO_NUMBER = re.compile(r"[FBW](?![\dW])", re.IGNORECASE).search
_LONGEST_STRETCH = 4  # an op is drawn at most this many times as wide as its label needs


def render_text(timeline: Timeline, *, width: int | None = None) -> str:
    """A ruler in ms, a line per rank, and a legend. Every action begins at the column of its start.

    An action is shown as its op and microbatch (`F5`), in lower case on a rank's second stage. Where a rank
    owns more than two stages it is shown with its stage (`2F5`). Dots are the bubble: idle time within the
    rank's span.
    width: the most characters per line; None: as many as the labels need. An action that is too narrow for
    its label is shown as its op alone. A B of one column directly before a W is shown as `|`: B and W side by
    side would read as BW, the whole backward.
    """
    margin = len(f"rank {timeline.timetable.num_ranks - 1}  ")
    labels = _labels(timeline.timetable)
    scale = _scale(timeline, labels)
    if width is not None and timeline.makespan > 0:
        scale = min(scale, max(width - margin, 1) / timeline.makespan)
    lines = [_line(timeline, rank, labels[rank], scale) for rank in range(timeline.timetable.num_ranks)]
    ruler = _ruler(timeline.makespan, scale)
    drawing = [f"{'ms':{margin}}{ruler}", *(f"{f'rank {i}':{margin}}{line}" for i, line in enumerate(lines))]
    return "\n".join([*(line.rstrip() for line in drawing), "", _legend(timeline, lines)])


def _labels(timetable: Timetable) -> list[list[str]]:
    places = index_on_rank(timetable)
    if max(places) > 1:
        return [[str(action) for action in row] for row in timetable.rows]
    return [
        [f"{op.name.lower() if places[stage] else op.name}{microbatch}" for stage, op, microbatch in row]
        for row in timetable.rows
    ]


def _scale(timeline: Timeline, labels: list[list[str]]) -> float:
    """Columns per ms, so that the typical action of each op is wide enough for its label and a blank.

    The typical action has the median duration: one short measured action does not stretch the drawing.
    """
    rows = timeline.timetable.rows
    ops = np.concatenate([row.ops for row in rows])
    lengths = np.array([len(label) for row in labels for label in row])
    durations = np.concatenate(
        [end - start for start, end in zip(timeline.starts, timeline.ends, strict=True)]
    )
    needs = [
        (int(lengths[ops == op].max()) + 1, float(np.median(durations[ops == op]))) for op in np.unique(ops)
    ]
    wanted = [columns / duration for columns, duration in needs if duration > 0]
    return min(max(wanted), _LONGEST_STRETCH * min(wanted)) if wanted else 0.0


def _column(time: float, scale: float) -> int:
    return math.floor(time * scale + 0.5 + 1e-6)  # sums of floats end a hair before the half


def _line(timeline: Timeline, rank: int, labels: list[str], scale: float) -> str:
    first = first_start(timeline)
    line = " " * _column(float(timeline.starts[rank][0]) - first, scale)
    spans = zip(timeline.starts[rank] - first, timeline.ends[rank] - first, labels, strict=True)
    for start, end, label in spans:
        line += _idle(_column(start, scale) - len(line))
        cell = _cell(label, _column(end, scale) - len(line))
        if cell[:1] + line[-1:] in ("WB", "wb"):
            line = line[:-1] + _B_BEFORE_W
        line += cell
    return line


def _idle(columns: int) -> str:
    return "." * (columns - 1) + " " if columns > 1 else "." * columns


def _cell(label: str, columns: int) -> str:
    """`F5`, `F5-- `; or, where the label is too long, `F ` or `F`."""
    if columns < len(label):
        label = label.strip("0123456789")
    return f"{label:-<{columns - 1}} " if columns > len(label) else label[: max(columns, 0)]


def _ruler(makespan: float, scale: float) -> str:
    line = ""
    for tick in _ticks(makespan, scale):
        line = f"{line:{_column(tick, scale)}}{tick:g}"
    return line


def _ticks(makespan: float, scale: float) -> Iterator[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at least eight columns apart."""
    step = 10.0 ** math.floor(math.log10(8 / scale)) if scale > 0 else math.inf
    step *= next((factor for factor in (1, 2, 5) if step * factor * scale >= 8), 10)
    yield 0.0
    for count in range(1, math.floor(makespan / step) + 1):
        yield count * step


def _legend(timeline: Timeline, lines: list[str]) -> str:
    timetable = timeline.timetable
    present = np.unique(np.concatenate([np.unique(row.ops) for row in timetable.rows])).tolist()
    ops = ", ".join(f"{Op(op).name} {MEANING[Op(op)]}" for op in present)
    most = max(index_on_rank(timetable))
    later_stages = ("", "; lower case: the rank's second stage", "; stage before the letter")[min(most, 2)]
    narrow = "; without a number: too narrow for it" if any(map(_HAS_NO_NUMBER, lines)) else ""
    bars = f"; {_B_BEFORE_W} : a narrow B before a W" if any(_B_BEFORE_W in line for line in lines) else ""
    hidden = "; W: what exchanges have not hidden of it" if timeline.exposed else ""
    return f"{ops}, each with its microbatch{later_stages}{narrow}{bars}; dots: bubble{hidden}"

"""What each rank holds over a step, as text: a table, the curves, what doesn't fit, what switches bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from zbpp.planning.memory_limit import memory_text
from zbpp.render.table import aligned, percent
from zbpp.schedule.costs import BYTES
from zbpp.schedule.interpret.memory import COMPONENTS, Levels, RankMemory, excess

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 72  # columns of a curve


def in_bytes(amount: float) -> str:
    """`5.59 GiB`."""
    return memory_text(amount, BYTES)


def render_memory(ranks: Sequence[RankMemory], how: str = "") -> str:
    """A line per rank: what it holds when it holds the most, and when that is; then the curves."""
    head = ("rank", *COMPONENTS, "temporary", "peak", "at")
    rows = [head, *map(_row, ranks)]
    largest = max(ranks, key=lambda each: each.peak)
    top = largest.peak
    curves = [f"{each.rank:>4}  {curve_text(each.during, top)}" for each in ranks]
    note = f" ({how})" if how else ""
    return "\n".join(
        [
            f"bytes that each rank holds at its peak, predicted{note}",
            *(line.rstrip() for line in aligned(rows)),
            "",
            f"over a step's actions; full height: {in_bytes(top)}",
            *curves,
            *_host_lines(ranks),
        ]
    )


def _host_lines(ranks: Sequence[RankMemory]) -> list[str]:
    """A line on the bytes in host memory; [] if there are none."""
    if not any(each.host for each in ranks):
        return []
    amounts = ", ".join(f"rank {each.rank} {in_bytes(each.host)}" for each in ranks)
    return ["", f"in host memory at most: {amounts}"]


def _row(rank: RankMemory) -> tuple[str, ...]:
    amounts = rank.at_peak
    cells = [in_bytes(amounts[name]) for name in (*COMPONENTS, "temporary")]
    return str(rank.rank), *cells, in_bytes(rank.peak), rank.peak_at


def curve_text(levels: Levels, top: float) -> str:
    """The levels as a line of bars, at most _WIDTH wide: the highest of the levels that share a column."""
    columns = np.array_split(np.asarray(levels), min(_WIDTH, len(levels)))
    heights = [max(1, round(float(each.max()) / (top or 1.0) * (len(_BARS) - 1))) for each in columns]
    return "".join(_BARS[height] for height in heights)


def render_limit(ranks: Sequence[RankMemory], limits: Sequence[float]) -> str:
    """Whether everything fits; else by how much each rank doesn't."""
    above = excess(ranks, limits)
    if not above:
        share = max(each.peak / limit for each, limit in zip(ranks, limits, strict=True))
        return f"everything fits: no rank needs more than {percent(share)} of its limit"
    return "\n".join(
        f"rank {rank} doesn't fit: it needs {in_bytes(limits[rank] + more)}, {in_bytes(more)} more than "
        f"{in_bytes(limits[rank])}"
        for rank, more in above.items()
    )


def render_switches(rows: Sequence[Mapping[str, str]]) -> str:
    """A line per switch: the peak with it, the bytes saved and the step's time; or why it is refused."""
    head = ("switch", "peak of any rank", "saves", "step time", "")
    cells = [(row["switch"], row["peak"], row["saves"], row["time"]) for row in rows]
    lines = aligned([head[:4], *cells])
    notes = ["", *(row["note"] for row in rows)]
    return "\n".join(f"{line}  {note}".rstrip() for line, note in zip(lines, notes, strict=True))

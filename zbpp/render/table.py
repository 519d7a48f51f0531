"""Figures of timelines as aligned text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from zbpp.render.style import EXCHANGE_MEANING, peak_name, peak_text, tail_text
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import PlanError

_DIGITS = 5  # of the largest time in a table: enough to see 762.5 beside 762


def render_table(outcomes: Mapping[str, Timeline | PlanError]) -> str:
    """One line per schedule, with its figures or the reason why it has no plan.

    Times are in ms. Max span, bubble, bubble rate and memory are the largest of any rank.
    """
    timelines = [each for each in outcomes.values() if isinstance(each, Timeline)]
    last = _last_columns(timelines[0]) if timelines else ("peak memory",)
    head = ("schedule", "stages/rank", "makespan", "max span", "bubble", "bubble rate", *last)
    decimals = decimals_of(each.makespan for each in timelines)
    rows = [_cells(name, outcome, decimals) for name, outcome in outcomes.items()]
    lines = aligned([head, *((*row, *[""] * (len(head) - len(row))) for row in rows)])
    refusals = [f"  {outcome}" if isinstance(outcome, PlanError) else "" for outcome in outcomes.values()]
    return "\n".join((line + end).rstrip() for line, end in zip(lines, ["", *refusals], strict=True))


def render_figures(timeline: Timeline) -> str:
    """The figures of one timeline: for each rank, and the largest of all ranks. Times are in ms."""
    head = ("", "span", "bubble", "bubble rate", *_last_columns(timeline))
    ranks = range(timeline.timetable.num_ranks)
    decimals = decimals_of(map(timeline.span, ranks))
    largest = ("largest", *_figures(timeline, decimals))
    lines = aligned([head, *(_rank_cells(timeline, rank, decimals) for rank in ranks), largest])
    return "\n".join(
        [*(line.rstrip() for line in lines), f"makespan {digits(timeline.makespan)} ms{tail_text(timeline)}"]
    )


def _cells(name: str, outcome: Timeline | PlanError, decimals: int) -> tuple[str, ...]:
    if isinstance(outcome, PlanError):
        return (name,)
    timetable = outcome.timetable
    per_rank = f"{timetable.num_stages / timetable.num_ranks:g}"
    return (name, per_rank, digits(outcome.makespan, decimals), *_figures(outcome, decimals))


def _figures(timeline: Timeline, decimals: int) -> tuple[str, ...]:
    return (
        digits(timeline.max_span, decimals),
        digits(timeline.bubble, decimals),
        percent(timeline.bubble_rate),
        *_exposed(timeline.exposed_exchange, decimals),
        peak_text(timeline),
    )


def _last_columns(timeline: Timeline) -> tuple[str, ...]:
    """The names of the columns that depend on the costs."""
    return (*([EXCHANGE_MEANING] if timeline.exposed else []), peak_name(timeline))


def _exposed(exposed: Sequence[float], decimals: int) -> tuple[str, ...]:
    """The cell of the largest exposed exchange; none where there are no exchanges."""
    return (digits(max(exposed), decimals),) if exposed else ()


def _rank_cells(timeline: Timeline, rank: int, decimals: int) -> tuple[str, ...]:
    span, idle = timeline.span(rank), timeline.idle(rank)
    times = digits(span, decimals), digits(idle, decimals)
    exposed = _exposed(timeline.exposed_exchange[rank : rank + 1], decimals)
    return (f"rank {rank}", *times, percent(idle / (span or 1.0)), *exposed, peak_text(timeline, rank))


def decimals_of(times: Iterable[float]) -> int:
    """How many decimals the times of a table have: the largest has five digits, or fewer if that is exact."""
    numbers = list(times)
    largest = max(numbers, default=0.0)
    most = max(0, _DIGITS - 1 - math.floor(math.log10(largest))) if largest > 0 else 0
    enough = (all(round(x, fewer) == round(x, most) for x in numbers) for fewer in range(most))
    return next((fewer for fewer, is_enough in enumerate(enough) if is_enough), most)


def digits(time: float, decimals: int | None = None) -> str:
    """A time in ms, rounded; never `-0`, which rounding -1e-15 would give."""
    if time >= 1e15:
        return f"{time:.5g}"
    places = decimals_of([time]) if decimals is None else decimals
    return f"{round(time, places) + 0.0:.{places}f}"


def percent(rate: float) -> str:
    """`11.11 %`."""
    return f"{round(100 * rate, 2) + 0.0:.2f} %"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows in columns, two blanks apart: the first column aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([f"{name:{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))])
        for name, *cells in rows
    ]

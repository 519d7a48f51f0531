"""Figures of timelines as aligned text: fine on a terminal, in a file and in a README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zbpp.schedule.render.titled import quantity
from zbpp.schedule.simulate import Timeline
from zbpp.schedule.timetable import PlanError


def render_table(outcomes: Mapping[str, Timeline | PlanError]) -> str:
    """One line per schedule; one that refuses shows its reason in place of figures.

    Times in ms; memory is the largest peak of a rank, in the unit of the costs.
    """
    head = ("schedule", "stages/rank", "makespan", "max span", "bubble", "bubble rate", "peak memory")
    lines = aligned([head, *(_cells(name, outcome) for name, outcome in outcomes.items())])
    refusals = [f"  {outcome}" if isinstance(outcome, PlanError) else "" for outcome in outcomes.values()]
    return "\n".join((line + end).rstrip() for line, end in zip(lines, ["", *refusals], strict=True))


def render_figures(timeline: Timeline) -> str:
    """The figures of one timeline, over all ranks and per rank; times in ms."""
    head = ("", "span", "bubble", "bubble rate", "peak memory")
    ranks = [_rank_cells(timeline, rank) for rank in range(timeline.timetable.num_ranks)]
    largest = ("largest", *_figures(timeline))
    lines = aligned([head, *ranks, largest])
    return "\n".join([*(line.rstrip() for line in lines), f"makespan {digits(timeline.makespan)} ms"])


def _cells(name: str, outcome: Timeline | PlanError) -> tuple[str, ...]:
    if isinstance(outcome, PlanError):
        return (name, *[""] * 6)
    timetable = outcome.timetable
    per_rank = f"{timetable.num_stages / timetable.num_ranks:g}"
    return (name, per_rank, digits(outcome.makespan), *_figures(outcome))


def _figures(timeline: Timeline) -> tuple[str, ...]:
    return (
        digits(timeline.max_span),
        digits(timeline.bubble),
        percent(timeline.bubble_rate),
        quantity(max(timeline.peak_memory)),
    )


def _rank_cells(timeline: Timeline, rank: int) -> tuple[str, ...]:
    span, idle = timeline.span(rank), timeline.idle(rank)
    rate, peak = idle / (span or 1.0), timeline.peak_memory[rank]
    return (f"rank {rank}", digits(span), digits(idle), percent(rate), quantity(peak))


def digits(time: float) -> str:
    """Six digits of a time in ms; sums of floats leave 1e-15 where a human expects 0."""
    return f"{round(time, 6) + 0.0:.6g}" if time < 1e6 else f"{time:.0f}"


def percent(rate: float) -> str:
    """`11.11 %`."""
    return f"{round(100 * rate, 2) + 0.0:.2f} %"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """First column to the left, figures to the right, two blanks between."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([f"{name:{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))])
        for name, *cells in rows
    ]

"""Which schedule to use, as text: an answer's tables, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from zbpp.schedule.choose import LADDER, Answer, Choice, num_messages
from zbpp.schedule.render.table import aligned, digits, percent
from zbpp.schedule.render.titled import quantity
from zbpp.schedule.simulate import Timeline
from zbpp.schedule.statements import SHAPES, in_memory, statements

_SHOWN = 8  # ranks whose peaks are listed
_WIDTH = 110


def render_advice(answer: Answer) -> str:
    """All sections, a blank line between them."""
    sections = [
        _question(answer),
        _ranked(answer),
        _too_large(answer),
        _refused(answer),
        _ladder(answer),
        _post_validation(answer),
        _conclusions(answer),
    ]
    return "\n\n".join(filter(None, sections))


def _question(answer: Answer) -> str:
    question = answer.question
    limit = question.memory_limit
    most = "no memory limit" if limit is None else f"at most {in_memory(answer, limit)} per rank"
    return (
        f"{question.num_ranks} ranks, {question.num_microbatches} microbatches, {most}; times in ms, best "
        f"{question.objective} first.\n1.00p is 1F1B's memory, {quantity(question.unit)}. "
        "Bound: no plan with the row's placement takes less."
    )


def _ranked(answer: Answer) -> str:
    times = ("makespan", "max span", "bubble rate", "bound", "gap")
    head = ("schedule", "placement", *times, "messages", "peak memory")
    timelines = [choice.candidate.timeline for choice in answer.ranked]
    return _table([head, *map(_row, answer.ranked)], ["per rank", *map(_peaks, timelines)])


def _row(choice: Choice) -> tuple[str, ...]:
    timeline = choice.candidate.timeline
    return (
        choice.candidate.name,
        choice.candidate.placement,
        digits(timeline.makespan),
        digits(timeline.max_span),
        percent(timeline.bubble_rate),
        digits(choice.bound.value),
        percent(choice.gap),
        str(num_messages(timeline.timetable)),
        quantity(max(timeline.peak_memory)),
    )


def _too_large(answer: Answer) -> str:
    head = ("needs more memory", "placement", "makespan", "max span", "peak memory")
    rows = [
        (
            candidate.name,
            candidate.placement,
            digits(candidate.timeline.makespan),
            digits(candidate.timeline.max_span),
            quantity(max(candidate.timeline.peak_memory)),
        )
        for candidate in answer.too_large
    ]
    peaks = [_peaks(candidate.timeline) for candidate in answer.too_large]
    return _table([head, *rows], ["per rank", *peaks]) if rows else ""


def _refused(answer: Answer) -> str:
    lines = [f"  {name}: {error}" for name, error in answer.refused.items()]
    return "\n".join(["can't be planned", *lines]) if lines else ""


def _ladder(answer: Answer) -> str:
    """With more or less memory: what was found, and its bound."""
    columns = [column for placement in LADDER for column in (SHAPES[placement], "bound", "gap")]
    limits = answer.question.limits
    rows = [
        (in_memory(answer, limit), *_cells([answer.best(placement, limit) for placement in LADDER]))
        for limit in limits
    ]
    return _table([(f"best {answer.question.objective} at", *columns), *rows])


def _post_validation(answer: Answer) -> str:
    """The largest span is what counts then: the optimizer step is no barrier."""
    limits = answer.question.span_limits
    columns = [column for limit in limits for column in (f"at {in_memory(answer, limit)}", "bound", "gap")]
    rows = [
        (SHAPES[placement], *_cells([answer.best(placement, limit, "span") for limit in limits]))
        for placement in LADDER
    ]
    return _table([("best max span (post-validation)", *columns), *rows])


def _cells(choices: Sequence[Choice | None]) -> tuple[str, ...]:
    return tuple(
        cell
        for choice in choices
        for cell in (
            (digits(choice.value), digits(choice.bound.value), percent(choice.gap))
            if choice
            else ("", "", "")
        )
    )


def _conclusions(answer: Answer) -> str:
    """Proved ones first."""
    lines = [
        fill(f"{'proved' if each.proved else 'found '}  {each.text}", _WIDTH, subsequent_indent=" " * 8)
        for each in sorted(statements(answer), key=lambda each: not each.proved)
    ]
    return "\n".join(["what follows", *lines]) if lines else ""


def _peaks(timeline: Timeline) -> str:
    """Of many ranks the least and the most."""
    peaks = [quantity(peak) for peak in timeline.peak_memory]
    if len(set(peaks)) == 1:
        return "all alike"
    if len(peaks) <= _SHOWN:
        return ", ".join(peaks)
    return f"{quantity(min(timeline.peak_memory))} to {quantity(max(timeline.peak_memory))}"


def _table(rows: Sequence[tuple[str, ...]], remarks: Sequence[str] = ()) -> str:
    """Aligned rows; remarks end them, aligned to the left."""
    ends = remarks or [""] * len(rows)
    return "\n".join(f"{line}  {end}".rstrip() for line, end in zip(aligned(rows), ends, strict=True))

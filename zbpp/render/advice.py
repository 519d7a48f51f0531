"""Which schedule to use, as text: the tables of an answer of `choose`, and the conclusions from it."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import NamedTuple

from zbpp.planning.answer import Answer, Candidate, Choice, num_messages
from zbpp.planning.memory_limit import memory_text
from zbpp.planning.request import SWEEP_PLACEMENTS
from zbpp.render.statements import SHAPES, limit_text, statements
from zbpp.render.style import peak_text
from zbpp.render.table import aligned, decimals_of, digits, percent
from zbpp.schedule.costs import ACTIVATIONS, BYTES
from zbpp.schedule.simulate import Timeline

_SHOWN = 8  # ranks whose peaks are listed
_WIDTH = 110


class Advice(NamedTuple):
    """question: what was asked. ranked: a table of the plans that fit, its head first. more: the rest."""

    question: str
    ranked: list[tuple[str, ...]]
    more: str

    def __str__(self) -> str:
        return f"{self.question}\n\n{_table(self.ranked)}\n\n{self.more}"


def render_advice(answer: Answer) -> Advice:
    """Which schedule to use, as text in sections."""
    sections = [
        _with_variants(answer),
        _too_large(answer),
        _refused(answer),
        _memory_sweep(answer),
        _post_validation(answer),
        _conclusions(answer),
    ]
    return Advice(_question(answer), _ranked(answer), "\n\n".join(filter(None, sections)))


def _question(answer: Answer) -> str:
    request = answer.request
    limit = request.memory_limit
    most = "no memory limit" if limit is None else f"at most {limit_text(answer, limit)} per rank"
    return (
        f"{request.num_ranks} ranks, {request.num_microbatches} microbatches, {most}; times in ms, best "
        f"{request.objective} first.\n"
        f"1.00p is {request.num_ranks} times the activations of the largest stage, "
        f"{_amount(answer, request.memory_of_1f1b)}; with equal stages 1F1B holds as much.\n"
        f"{_static(answer)}"
        "Bound: no plan with the row's placement and within the memory limit takes less."
    )


def _static(answer: Answer) -> str:
    """A sentence on the memory that a rank holds beside activations; "" where it is not known."""
    static = answer.request.static
    if not static:
        return ""
    most = memory_text(static, answer.request.costs.memory_unit)
    return f"Weights, gradients and optimizer states, up to {most} per rank, count in every limit and peak.\n"


def _amount(answer: Answer, memory: float) -> str:
    unit = answer.request.costs.memory_unit
    text = memory_text(memory, unit)
    return f"{text} activations of one rank's share of the model" if unit == ACTIVATIONS else text


def _ranked(answer: Answer) -> list[tuple[str, ...]]:
    times = ("makespan", "max span", "bubble rate", "bound", "gap")
    return [
        ("schedule", "placement", *times, "messages", _peak_name(answer), "per rank"),
        *(_row(choice, _decimals(answer)) for choice in answer.ranked),
    ]


def _decimals(answer: Answer) -> int:
    """How many decimals times have, the same in all tables."""
    return decimals_of(candidate.timeline.makespan for candidate in answer.candidates)


def _peak_name(answer: Answer) -> str:
    return "peak memory" if answer.request.costs.memory_unit == BYTES else "peak activations"


def _row(choice: Choice, decimals: int) -> tuple[str, ...]:
    timeline = choice.candidate.timeline
    return (
        choice.candidate.title,
        choice.candidate.placement,
        digits(timeline.makespan, decimals),
        digits(timeline.max_span, decimals),
        percent(timeline.bubble_rate),
        digits(choice.bound.value, decimals),
        percent(choice.gap),
        str(num_messages(timeline.timetable)),
        peak_text(timeline),
        _peaks(timeline),
    )


def _too_large(answer: Answer) -> str:
    head = ("needs more memory", "placement", "makespan", "max span", _peak_name(answer), "per rank")
    rows = [
        (
            candidate.name,
            candidate.placement,
            digits(candidate.timeline.makespan, _decimals(answer)),
            digits(candidate.timeline.max_span, _decimals(answer)),
            peak_text(candidate.timeline),
            _peaks(candidate.timeline),
        )
        for candidate in answer.too_large
    ]
    return _table([head, *rows]) if rows else ""


def _with_variants(answer: Answer) -> str:
    """Each schedule with the offload or recompute that lets it fit, or hold less; "" if none has any."""
    pairs = answer.with_variants
    if all(variant.title == "nothing" for _, variant in pairs):
        return ""
    head = ("schedule", "with", "makespan", "without", _peak_name(answer), "per rank")
    rows = [
        (
            candidate.title,
            variant.title,
            digits(variant.timeline.makespan, _decimals(answer)),
            _without(answer, candidate),
            peak_text(variant.timeline),
            _peaks(variant.timeline),
        )
        for candidate, variant in pairs
    ]
    kept = percent(answer.request.kept)
    return (
        "with activation offload, and with recompute where the limit asks for it, best "
        f"{answer.request.objective} first\n{_table([head, *rows])}\n"
        f"a stage that recomputes takes its F longer in B, and keeps {kept} of `saved` until then (--kept)"
    )


def _without(answer: Answer, candidate: Candidate) -> str:
    """The time without offload and recompute, if that fits."""
    fits = candidate.fits(answer.request.memory_limit)
    return digits(candidate.timeline.makespan, _decimals(answer)) if fits else "too large"


def _refused(answer: Answer) -> str:
    lines = [f"  {name}: {error}" for name, error in answer.refused.items()]
    return "\n".join(["can't be planned", *lines]) if lines else ""


def _memory_sweep(answer: Answer) -> str:
    """For each memory limit of the sweep the best plan of each placement, and its bound."""
    columns = [column for placement in SWEEP_PLACEMENTS for column in (SHAPES[placement], "bound", "gap")]
    limits = answer.request.limits
    rows = [
        (
            limit_text(answer, limit),
            *_cells(answer, [answer.best(placement, limit) for placement in SWEEP_PLACEMENTS]),
        )
        for limit in limits
    ]
    return _table([(f"best {answer.request.objective} at", *columns), *rows])


def _post_validation(answer: Answer) -> str:
    """The best largest span: what a step costs with post-validation."""
    limits = answer.request.span_limits
    columns = [column for limit in limits for column in (f"at {limit_text(answer, limit)}", "bound", "gap")]
    rows = [
        (SHAPES[placement], *_cells(answer, [answer.best(placement, limit, "span") for limit in limits]))
        for placement in SWEEP_PLACEMENTS
    ]
    table = _table([("best max span *", *columns), *rows])
    return f"{table}\n* what a step costs with post-validation: optimizer.validation=after"


def _cells(answer: Answer, choices: Sequence[Choice | None]) -> tuple[str, ...]:
    decimals = _decimals(answer)
    return tuple(
        cell
        for choice in choices
        for cell in (
            (digits(choice.value, decimals), digits(choice.bound.value, decimals), percent(choice.gap))
            if choice
            else ("", "", "")
        )
    )


def _conclusions(answer: Answer) -> str:
    """The sentences of `statements`, proved ones first."""
    lines = [
        fill(f"{'proved' if each.proved else 'found '}  {each.text}", _WIDTH, subsequent_indent=" " * 8)
        for each in sorted(statements(answer), key=lambda each: not each.proved)
    ]
    return "\n".join(["what follows", *lines]) if lines else ""


def _peaks(timeline: Timeline) -> str:
    """The peak of each rank; if there are many ranks, the least and the most."""
    peaks = [peak_text(timeline, rank) for rank in range(timeline.timetable.num_ranks)]
    if len(set(peaks)) == 1:
        return "all alike"
    if len(peaks) <= _SHOWN:
        return ", ".join(peaks)
    return f"{memory_text(min(timeline.peak_memory), timeline.memory_unit)} to {peak_text(timeline)}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Aligned rows. A last column `per rank` is aligned to the left, since its entries are lists."""
    if rows[0][-1] != "per rank":
        return "\n".join(map(str.rstrip, aligned(rows)))
    lines = zip(aligned([row[:-1] for row in rows]), rows, strict=True)
    return "\n".join(f"{line}  {row[-1]}".rstrip() for line, row in lines)

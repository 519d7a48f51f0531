"""An answer of `choose` as text: the plans, best first, and what more memory could bring at best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zbpp.planning.choose import Answer, Candidate
from zbpp.planning.memory_limit import MemoryLimit, memory_text
from zbpp.planning.placement import PLACEMENTS
from zbpp.render.style import peak_text
from zbpp.render.table import aligned, decimals_of, digits, percent
from zbpp.schedule.costs import BYTES

_SHORT_W = 0.1  # as a share of F, B and W
_MULTIPLES = (1.0, 1.25, 1.5, 2.0)  # of the memory limit


def render_choice(answer: Answer) -> str:
    """The question, a table of the plans that fit, those that don't, and bounds for other limits."""
    sections = [_question(answer), _ranked(answer), _too_large(answer), _refused(answer), _bounds(answer)]
    return "\n\n".join(filter(None, sections))


def render_bought(answers: Mapping[str, Answer]) -> str:
    """The best plan of each answer, by what was changed for it: `as asked`, `half the bytes`."""
    found = {name: each.ranked[0] for name, each in answers.items()}
    decimals = decimals_of(each.timeline.makespan for each in found.values())
    rows = [
        (name, digits(each.timeline.makespan, decimals), digits(each.bound.value, decimals), each.title)
        for name, each in found.items()
    ]
    return _table([("the best plan with", "makespan", "bound", "schedule"), *rows])


def render_short_w(f: float, b: float, w: float) -> str:
    """A line on a W that is at most a tenth of the work, as with adapters; "" for any other."""
    share = w / (f + b + w) if f + b + w else 1.0
    if share > _SHORT_W:
        return ""
    return (
        f"W is {percent(share)} of the work of F, B and W: delaying it gains next to nothing; a V, more "
        "stages per rank and slices (schedule.slices) shorten the step"
    )


def _question(answer: Answer) -> str:
    request, unit = answer.request, answer.request.costs.memory_unit
    limit = request.memory_limit
    most = "no memory limit" if limit is None else f"at most {_limit_text(answer, limit)} per rank"
    held = "activations of its share of the model for one microbatch"
    if unit == BYTES:
        static = memory_text(request.static, unit)
        held = f"weights, gradients and optimizer states (up to {static}), and activations"
    return (
        f"{request.num_ranks} ranks, {request.num_microbatches} microbatches, {most}; times in ms, shortest "
        f"makespan first.\n{_peak(answer).capitalize()}: the most that a rank holds at a time: {held}.\n"
        "Max span: the longest time from a rank's first action to its last.\n"
        "Bound: no plan with the row's placement and within the memory limit takes less."
    )


def _limit_text(answer: Answer, limit: MemoryLimit) -> str:
    """A memory limit as `12 GiB`, or `8 activations`."""
    if not isinstance(limit, int | float):
        return "the given memory"
    unit = answer.request.costs.memory_unit
    return memory_text(limit, unit) + (" activations" if unit != BYTES else "")


def _ranked(answer: Answer) -> str:
    head = ("schedule", "placement", "makespan", "max span", "bubble rate", "bound", "gap", _peak(answer))
    return _table([head, *(_row(each, _decimals(answer)) for each in answer.ranked)])


def _row(candidate: Candidate, decimals: int) -> tuple[str, ...]:
    timeline = candidate.timeline
    return (
        candidate.title,
        candidate.placement,
        digits(timeline.makespan, decimals),
        digits(timeline.max_span, decimals),
        percent(timeline.bubble_rate),
        digits(candidate.bound.value, decimals),
        "optimal" if candidate.proved_optimal else percent(candidate.gap),
        peak_text(timeline),
    )


def _too_large(answer: Answer) -> str:
    head = ("needs more memory", "placement", "makespan", "max span", _peak(answer))
    rows = [_row_without_bound(each, _decimals(answer)) for each in answer.too_large]
    return _table([head, *rows]) if rows else ""


def _row_without_bound(candidate: Candidate, decimals: int) -> tuple[str, ...]:
    timeline = candidate.timeline
    times = (digits(time, decimals) for time in (timeline.makespan, timeline.max_span))
    slices = f" --slices {candidate.num_slices}" if candidate.num_slices > 1 else ""
    return (f"{candidate.name}{slices}", candidate.placement, *times, peak_text(timeline))


def _refused(answer: Answer) -> str:
    lines = [f"  {name}: {error}" for name, error in answer.refused.items()]
    return "\n".join(["can't be planned", *lines]) if lines else ""


def _bounds(answer: Answer) -> str:
    """What no plan can undercut, by placement, within multiples of the memory limit; empty without one."""
    request, decimals = answer.request, _decimals(answer)
    if request.memory_limit is None:
        return ""
    rows: list[tuple[str, ...]] = [("no plan takes less within", *PLACEMENTS)]
    for text, limit in _limits(answer, request.memory_limit):
        bounds = (request.bound(placement, limit) for placement in PLACEMENTS)
        rows.append((text, *("" if each is None else digits(each.value, decimals) for each in bounds)))
    return _table(rows)


def _limits(answer: Answer, given: float | Sequence[float]) -> Iterator[tuple[str, MemoryLimit]]:
    for multiple in _MULTIPLES:
        limit = multiple * given if isinstance(given, int | float) else [multiple * each for each in given]
        times = f" x {multiple:g}" if isinstance(given, Sequence) and multiple > 1 else ""
        yield _limit_text(answer, limit) + times, limit
    yield "any memory", None


def _decimals(answer: Answer) -> int:
    """How many decimals times have, the same in all tables."""
    return decimals_of(each.timeline.makespan for each in (*answer.ranked, *answer.too_large))


def _peak(answer: Answer) -> str:
    return "peak memory" if answer.request.costs.memory_unit == BYTES else "peak activations"


def _table(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(map(str.rstrip, aligned(rows)))

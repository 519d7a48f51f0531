"""Marks: limits that the values of a run on a GPU must not exceed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zbpp.benchmark.gpu.rows import Outcome, Row

HELD, NOT_HELD, NOT_MEASURED = "held", "not held", "not measured"


@dataclass(frozen=True)
class Mark:
    """A value that is not to exceed a limit. part: where it is measured."""

    name: str
    text: str
    limit: float
    part: str


MARKS = (
    Mark("after_b", "live bytes after B / after F, 1e9 weights in bfloat16", 0.85, "split"),
    Mark("backward", "(B + W) / backward, 1e9 weights in bfloat16", 1.00, "split"),
    Mark("graphs_host", "host time per action, CUDA graphs / eager, hidden 1024", 0.20, "graphs"),
    Mark("graphs_equal", "losses under replay that differ from eager's in any bit", 0.0, "graphs"),
    Mark(
        "schedules_equal",
        "losses of all schedules that differ from plain autograd's in any bit",
        0.0,
        "schedules",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """A mark with what was found. verdict: held, not held, not measured; why: why it was not measured."""

    mark: Mark
    verdict: str
    value: float | None = None
    noise: float = 0.0
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """The verdict as a dict."""
        return asdict(self)


def verdicts(outcomes: Sequence[Outcome], *, is_real: bool) -> list[Verdict]:
    """A verdict for each mark. is_real: whether sizes and device are those that the marks are for."""
    found: dict[str, Row] = {}
    for row in (row for outcome in outcomes for row in outcome.rows if row.mark and row.values):
        assert row.mark is not None
        if row.mark not in found or _least(row) > _least(found[row.mark]):  # of several, the worst
            found[row.mark] = row
    whys = {outcome.name: outcome.why for outcome in outcomes}
    return [
        _verdict(mark, found.get(mark.name), whys.get(mark.part, "not asked for"), is_real=is_real)
        for mark in MARKS
    ]


def _least(row: Row) -> float:
    """The row's first value less its measuring error; NaN counts as infinite."""
    value = next(iter(row.values.values())) - row.noise
    return math.inf if math.isnan(value) else value


def _verdict(mark: Mark, row: Row | None, why: str, *, is_real: bool) -> Verdict:
    if row is None:
        return Verdict(mark, NOT_MEASURED, why=why or "the part has no such row")
    value = next(iter(row.values.values()))
    if not is_real:
        return Verdict(mark, NOT_MEASURED, value, row.noise, "of the small form, for which the mark is not")
    return Verdict(mark, HELD if _least(row) <= mark.limit else NOT_HELD, value, row.noise)


def all_held(found: Iterable[Verdict]) -> bool:
    """Whether no mark was missed; one that was not measured was not missed."""
    return all(each.verdict != NOT_HELD for each in found)

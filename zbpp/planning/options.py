"""The objectives, the tolerances, and the check of a count.

ROUNDING: what a sum of floats may be off by. A memory level that passes its limit by no more is within the
    limit, and two times that differ by no more are equal.
EQUAL: how close a plan's time must be to a lower bound to count as optimal. It is ten times ROUNDING, since a
    bound is lowered by ROUNDING in several places, so that rounding never puts it above a plan.
Both are relative. No other file of planning defines a tolerance.
"""

from __future__ import annotations

from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import PlanError

ROUNDING = 1e-9
EQUAL = 1e-8

MAKESPAN, SPAN = "makespan", "span"
OBJECTIVES = (MAKESPAN, SPAN)


def objective_value(timeline: Timeline, objective: str) -> float:
    """The makespan of a timeline or, for "span", the longest of the ranks' spans; ms."""
    return timeline.makespan if objective == MAKESPAN else timeline.max_span


def check_count(name: str, count: object) -> None:
    """Raises PlanError unless `count` is a whole number, 1 or more."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise PlanError(f"{name}={count!r}: write a whole number, 1 or more")

"""What plans are compared by: the objectives, and how close two times count as equal.

ROUNDING: what a sum of floats may be off by. A memory level that passes its limit by no more is within the
    limit, and two times that differ by no more are equal.
EQUAL: how close a plan's time must be to a lower bound to count as optimal. It is ten times ROUNDING, since a
    bound is lowered by ROUNDING in several places, so that rounding never puts it above a plan.
Both are relative. No other file of planning defines a tolerance.
"""

from __future__ import annotations

from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import PlanError

MAKESPAN, SPAN = "makespan", "span"
OBJECTIVES = (MAKESPAN, SPAN)


def check_objective(objective: str) -> None:
    """Raises PlanError for an unknown objective."""
    if objective not in OBJECTIVES:
        raise PlanError(f"objective={objective!r}: write {' or '.join(OBJECTIVES)}")


def objective_value(timeline: Timeline, objective: str) -> float:
    """The makespan of a timeline or, for "span", the longest of the ranks' spans; ms."""
    return timeline.makespan if objective == MAKESPAN else timeline.max_span


ROUNDING = 1e-9
EQUAL = 1e-8

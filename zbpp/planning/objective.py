"""What a plan is judged by: its makespan or its largest span."""

from __future__ import annotations

from zbpp.schedule.simulate import Timeline
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

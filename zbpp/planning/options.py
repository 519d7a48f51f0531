"""The objectives, the tolerances, and the ranges of the options of `plan`.

ROUNDING: what a sum of floats may be off by. A memory level that passes its limit by no more is within the
    limit, and two times that differ by no more are equal.
EQUAL: how close a plan's time must be to a lower bound to count as optimal. It is ten times ROUNDING, since a
    bound is lowered by ROUNDING in several places, so that rounding never puts it above a plan.
Both are relative. No other file of planning defines a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from zbpp.planning.placement import PLACEMENTS
from zbpp.schedule.costs import Costs
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import PlanError

ROUNDING = 1e-9
EQUAL = 1e-8

MAKESPAN, SPAN = "makespan", "span"
OBJECTIVES = (MAKESPAN, SPAN)

# Measured: a family takes 110 to 230 bytes per action to plan and simulate, a search 500 to 650. So the check
# is an estimate: a plan that passes may take up to three times 8 GiB, if its backwards are split.
BYTES_PER_ACTION = 128
BYTES_PER_SEARCHED_ACTION = 640
_MOST_BYTES = 8 * 2**30
_LEAST_PER_STAGE = 2  # the fewest actions per microbatch and stage: F and BW (F, B and W are three)


def objective_value(timeline: Timeline, objective: str) -> float:
    """The makespan of a timeline or, for "span", the longest of the ranks' spans; ms."""
    return timeline.makespan if objective == MAKESPAN else timeline.max_span


def check_count(name: str, count: object) -> None:
    """Raises PlanError unless `count` is a whole number, 1 or more."""
    if not _is_count(count):
        raise PlanError(f"{name}={count!r}: write a whole number, 1 or more")


def check_size(
    num_ranks: int, num_microbatches: int, stages_per_rank: int = 1, bytes_per_action: int = BYTES_PER_ACTION
) -> None:
    """Raises PlanError for counts below 1, and for a plan whose estimate is above 8 GiB."""
    check_count("num_ranks", num_ranks)
    check_count("num_microbatches", num_microbatches)
    actions = num_ranks * num_microbatches * stages_per_rank * _LEAST_PER_STAGE
    if actions > _MOST_BYTES // bytes_per_action:
        raise PlanError(
            f"num_ranks={num_ranks:,}, num_microbatches={num_microbatches:,}: so many actions take more than "
            f"{_MOST_BYTES >> 30} GiB to plan: write smaller numbers"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_real(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return 0 <= float(value) < math.inf  # NaN is not


def _is_limit(value: object) -> bool:
    each = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return all(map(_is_real, each))


# argument -> (what it must be, what to write)
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "costs": (lambda value: isinstance(value, Costs), "write Costs(f=..., b=..., w=...)"),
    "memory_limit": (
        lambda value: value is None or _is_limit(value),
        "write a number, 0 or more, in the unit of costs.saved, or one per rank; None: no limit",
    ),
    "placement": (lambda value: value in (None, *PLACEMENTS), f"write {' or '.join(PLACEMENTS)}"),
    "stages_per_rank": (
        lambda value: value is None or _is_count(value),
        "write a whole number, 1 or more",
    ),
    "objective": (lambda value: value in OBJECTIVES, f"write {' or '.join(OBJECTIVES)}"),
    "search": (lambda value: isinstance(value, bool), "write True or False"),
    "time_limit": (_is_real, "write seconds, 0 or more"),
    "seed": (lambda value: isinstance(value, int) and not isinstance(value, bool), "write a whole number"),
    "progress": (lambda value: value is None or callable(value), "write a function, or None"),
}


def check_range(name: str, value: object) -> None:
    """Raises PlanError, with what to write, if an argument of `plan` is out of its range."""
    in_range, advice = _RANGES[name]
    if not in_range(value):
        raise PlanError(f"{name}={value!r}: {advice}")

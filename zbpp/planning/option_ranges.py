"""The ranges of what `plan` may be asked for, and what to write instead of a value out of range."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from zbpp.planning.objective import OBJECTIVES
from zbpp.planning.placement import PLACEMENTS
from zbpp.planning.size_limit import is_count
from zbpp.schedule.costs import Costs
from zbpp.schedule.timetable import PlanError


def _is_real(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return 0 <= float(value) < math.inf  # NaN is not
    except OverflowError:  # an int too large for a float
        return False


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
        lambda value: value is None or is_count(value),
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

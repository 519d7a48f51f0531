"""Memory limits as people write them: `8` activations, or `12GiB` where the costs are in bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from zbpp.schedule.costs import ACTIVATIONS, BYTES, Costs
from zbpp.schedule.timetable import PlanError, shown

MemoryLimit = float | str | Sequence[float | str] | None

_LIMIT = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(?:([kmgt]?)(i?)b)?", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_ADVICE = {
    BYTES: "the costs are in bytes; write a unit, such as 12GiB",
    ACTIVATIONS: "the costs are in activations of one rank's share of the model; write how many, such as 8, "
    "or give costs in bytes, as scripts/measure.py writes them",
}


def read_memory_limit(value: MemoryLimit, costs: Costs) -> float | list[float] | None:
    """The limit of a rank in the unit of costs.saved, as `plan` takes it; a list: one per rank; None: no limit.

    value: `8`, `12GiB`, `512MB`, a list of these, or several in one text: `8,8,6,6`. A limit in bytes has a
    unit, one in activations has none. Raises PlanError.
    """
    if isinstance(value, str) and "," in value:
        value = value.split(",")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_read(each, costs.memory_unit) for each in value]
    return None if value is None else _read(value, costs.memory_unit)


def _read(value: float | str, unit: str) -> float:
    match = _LIMIT.fullmatch(str(value).strip())
    if match is None:
        raise PlanError(f"memory limit {shown(value)} is no amount of memory: {_ADVICE[unit]}")
    number, prefix, binary = match.groups()
    if (prefix is not None) != (unit == BYTES):
        raise PlanError(f"memory limit {shown(value)}: {_ADVICE[unit]}")
    return float(number) * (1024 if binary else 1000) ** _POWERS[(prefix or "").lower()]

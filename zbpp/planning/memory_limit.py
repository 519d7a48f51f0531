"""Memory limits: read as people write them, resolved per rank, and compared with what a plan needs.

People write `8` (activations), or `12GiB` where the costs are in bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from zbpp.planning.options import ROUNDING
from zbpp.planning.rank_costs import RankCosts
from zbpp.schedule.costs import ACTIVATIONS, BYTES, Costs
from zbpp.schedule.timetable import PlanError, shown

MemoryLimit = float | Sequence[float] | None
"""The most that a rank may hold, in the unit of costs.saved: one number for all ranks, or a list with one per
rank; None: no limit."""

WrittenLimit = float | str | Sequence[float | str] | None

_LIMIT = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(?:([kmgt]?)(i?)b)?", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_ADVICE = {
    BYTES: "the costs are in bytes; write a unit, such as 12GiB",
    ACTIVATIONS: "the costs are in activations of one rank's share of the model; write how many, such as 8, "
    "or give costs in bytes, as zbpp measure writes them",
}


def read_memory_limit(value: WrittenLimit, costs: Costs | RankCosts) -> float | list[float] | None:
    """The limit in the unit of costs.saved, or a list with one number per rank, as `plan` takes it.

    value: `8`, `12GiB`, `512MB`, a list of such limits, or several in one text: `8,8,6,6`; None: no limit.
    A limit in bytes has a unit, one in activations has none. Raises PlanError.
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
    base = 1024.0 if binary else 1000.0
    return float(number) * base ** _POWERS[(prefix or "").lower()]


# ---------------------------------------------------------------- limits against levels


def limits_per_rank(memory_limit: MemoryLimit, num_ranks: int) -> tuple[float, ...]:
    """One limit per rank, infinity where there is none. Raises PlanError for a list of another length."""
    if memory_limit is None:
        return (math.inf,) * num_ranks
    limits = memory_limit if isinstance(memory_limit, Sequence) else [memory_limit] * num_ranks
    if len(limits) != num_ranks:
        raise PlanError(
            f"the memory limit is a list of length {len(limits)} for {num_ranks} ranks: write one number for "
            "all ranks, or one for each"
        )
    return tuple(map(float, limits))


def ceiling(limit: float) -> float:
    """The limit plus what the rounding of a sum may add."""
    return limit * (1 + ROUNDING)


def fits(levels: Iterable[float], limits: Iterable[float]) -> bool:
    """Whether every rank's memory level is within its limit."""
    return all(level <= ceiling(limit) for level, limit in zip(levels, limits, strict=True))


def check_fits(plan: str, peaks: Sequence[float], limits: Sequence[float], unit: str) -> None:
    """Raises PlanError, with what the plan needs, unless every rank's peak is within its limit."""
    if fits(peaks, limits):
        return
    excess = [peak - limit for peak, limit in zip(peaks, limits, strict=True)]
    rank = excess.index(max(excess))
    raise PlanError(
        f"{plan} needs {memory_text(peaks[rank], unit)} on rank {rank}, "
        f"the memory limit allows {memory_text(limits[rank], unit)}; "
        f"this plan needs, per rank: {_as_limits(peaks, unit)}"
    )


def check_holds_one_microbatch(least: Sequence[float], limits: Sequence[float], unit: str) -> None:
    """Raises PlanError if some rank's limit is below the least memory with which it can run a microbatch."""
    for rank, (needed, limit) in enumerate(zip(least, limits, strict=True)):
        if not needed <= ceiling(limit):  # NaN too
            raise PlanError(
                f"the memory limit {memory_text(limit, unit)} on rank {rank} can't hold one microbatch; "
                f"the least that works, per rank: {_as_limits(least, unit)}"
            )


def _as_limits(memory: Iterable[float], unit: str) -> str:
    """What each rank needs, as it can be typed for a limit."""
    return ", ".join(f"{math.ceil(each)}B" if unit == BYTES else f"{each:.12g}" for each in memory)


# ---------------------------------------------------------------- as text


def quantity(number: float) -> str:
    """Four digits at most, with k, M, G, T for large numbers."""
    power = min(int(math.log10(number) / 3), 4) if number >= 1e4 else 0
    return f"{number / 1000**power:.4g}{('', ' k', ' M', ' G', ' T')[power]}"


def memory_text(amount: float, unit: str) -> str:
    """`5.59 GiB`; activations as a number."""
    if unit != BYTES:
        return quantity(amount)
    power = min(int(math.log2(amount) / 10), len(_BINARY) - 1) if amount >= 1 else 0
    number = amount / 1024**power
    return f"{number:.{3 if number < 999.5 else 4}g} {_BINARY[power]}"

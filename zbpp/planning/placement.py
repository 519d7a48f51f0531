"""Placements by name: which rank owns which stage.

one      one stage per rank
looped   two or more stages per rank; stage s is on rank s mod num_ranks
v        two stages per rank; stages go from rank 0 to the last rank, and back to rank 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from zbpp.schedule.timetable import PlanError


class _StagesPerRank(NamedTuple):
    least: float
    most: float
    default: int
    advice: str


_STAGES_PER_RANK = {
    "one": _StagesPerRank(1, 1, 1, "1 (for more, write placement='looped' or 'v')"),
    "looped": _StagesPerRank(2, math.inf, 2, "2 or more (one stage per rank is placement='one')"),
    "v": _StagesPerRank(2, 2, 2, "2"),
}
PLACEMENTS = tuple(_STAGES_PER_RANK)


def place_stages(num_ranks: int, placement: str, stages_per_rank: int | None = None) -> tuple[int, ...]:
    """rank_of[stage]. Raises PlanError if placement and stages_per_rank contradict each other.

    stages_per_rank None: 1 for "one", else 2.
    """
    if placement not in PLACEMENTS:
        raise PlanError(f"placement={placement!r}: write {' or '.join(PLACEMENTS)}")
    allowed = _STAGES_PER_RANK[placement]
    per_rank = allowed.default if stages_per_rank is None else stages_per_rank
    if not (isinstance(per_rank, int) and allowed.least <= per_rank <= allowed.most):
        raise PlanError(
            f"placement={placement!r} and stages_per_rank={stages_per_rank!r} contradict each other: "
            f"stages_per_rank must be {allowed.advice}, or left out"
        )
    return _owners(num_ranks, placement, per_rank)


def has_placement(rank_of: Sequence[int], placement: str) -> bool:
    """Whether the stages are placed so. Two stages on one rank are both a loop and a V."""
    num_ranks = max(rank_of) + 1
    per_rank, allowed = len(rank_of) // num_ranks, _STAGES_PER_RANK[placement]
    fits = allowed.least <= per_rank <= allowed.most
    return fits and tuple(rank_of) == _owners(num_ranks, placement, per_rank)


def placement_name(rank_of: Sequence[int]) -> str:
    """The placement of rank_of[stage]: "one", "v" (also for two stages on one rank), "looped" or "other"."""
    return next((name for name in ("one", "v", "looped") if has_placement(rank_of, name)), "other")


def _owners(num_ranks: int, placement: str, per_rank: int) -> tuple[int, ...]:
    down = tuple(range(num_ranks))
    return down + down[::-1] if placement == "v" else down * per_rank

"""`plan`: the one door to every schedule."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from zbpp.schedule.costs import Costs
from zbpp.schedule.families import SCHEDULES
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import PlanError, Timetable


def plan(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
    placement: str | None = None,
    stages_per_rank: int | None = None,
) -> Timetable:
    """The timetable of a schedule in `SCHEDULES`.

    memory_limit: in the unit of costs.saved, per rank or one per rank; None: no limit.
    placement ("one" | "looped" | "v") and stages_per_rank: None for the family's own.
    Raises PlanError for an unknown name, counts below 1, a value that contradicts the family,
    or a family that exceeds the memory limit (the message says by how much).
    """
    if name not in SCHEDULES:
        raise PlanError(_unknown(name))
    for count, value in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        if not isinstance(value, int) or value < 1:
            raise PlanError(f"{count}={value!r}: write a whole number, 1 or more")
    timetable = SCHEDULES[name](num_ranks, num_microbatches)
    _check_placement(name, timetable, placement, stages_per_rank)
    if memory_limit is not None:
        _check_memory(name, timetable, costs or Costs(), memory_limit)
    return timetable


def placement_of(timetable: Timetable) -> str:
    """ "one" stage per rank, "looped" (stage s on rank s mod p), "v" (down and back up), or "other"."""
    num_ranks, rank_of = timetable.num_ranks, timetable.rank_of
    there = tuple(range(num_ranks))
    shapes = {there: "one", there + there[::-1]: "v"}
    looped = there * (len(rank_of) // num_ranks)
    return shapes.get(rank_of, "looped" if rank_of == looped else "other")


def _check_placement(
    name: str, timetable: Timetable, placement: str | None, stages_per_rank: int | None
) -> None:
    own, per_rank = placement_of(timetable), timetable.num_stages // timetable.num_ranks
    if placement is not None and placement != own:
        raise PlanError(f"{name} places its stages as {own!r}, not {placement!r}: leave placement out")
    if stages_per_rank is not None and stages_per_rank != per_rank:
        raise PlanError(
            f"{name} has {per_rank} stage(s) per rank, not {stages_per_rank}: leave stages_per_rank out"
        )


def _check_memory(name: str, timetable: Timetable, costs: Costs, limit: float | Sequence[float]) -> None:
    limits = list(limit) if isinstance(limit, Sequence) else [limit] * timetable.num_ranks
    if len(limits) != timetable.num_ranks:
        raise PlanError(f"memory_limit has {len(limits)} numbers for {timetable.num_ranks} ranks")
    peaks = simulate(timetable, costs).peak_memory
    for rank, (peak, allowed) in enumerate(zip(peaks, limits, strict=True)):
        if not peak <= allowed:
            raise PlanError(f"{name} needs {peak:g} on rank {rank}, memory_limit allows {allowed:g}")


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(str(name), SCHEDULES, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}{hint}"

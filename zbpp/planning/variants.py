"""One plan with activation offload, with recompute, and with both: what each takes and holds.

Recompute: the stages that have to, so that the plan fits a memory limit at least cost (recompute.py). Such a
stage keeps a share of `saved` from F until B; in B all of one microbatch is there again. It is not offloaded.
Offload: what leaves without making an action late (zbpp/schedule/offload_choice.py), at the costs' `host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from zbpp.planning.memory_limit import MemoryLimit, fits, limits_per_rank
from zbpp.planning.objective import objective_value
from zbpp.planning.recompute import LimitTooLow, Stages, cheapest_recompute, with_recompute
from zbpp.schedule.costs import Costs
from zbpp.schedule.offload import RankOffload
from zbpp.schedule.offload_choice import choose_offload
from zbpp.schedule.peak_memory import peak_memory
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import Timetable

KEPT = 0.1
"""The share of `saved` that a recomputed stage keeps, where nobody has measured it: its blocks' inputs."""

_MOST_TRIED = 32  # combinations of stages of all ranks
_MOST_STAGES = 6  # of a rank, whose sets are tried


@dataclass(frozen=True)
class Variant:
    """A plan with what runs beside it. timeline.peak_memory counts offload and recompute."""

    timeline: Timeline
    is_offloaded: bool = False
    recomputed: Stages = frozenset()

    @property
    def title(self) -> str:
        """`offload, recompute of stages 0, 1`; `nothing` for the plan itself."""
        stages = ", ".join(map(str, sorted(self.recomputed)))
        words = ["offload"] * self.is_offloaded
        words += [f"recompute of stage{'s' * (len(self.recomputed) > 1)} {stages}"] if stages else []
        return ", ".join(words) or "nothing"

    def fits(self, limit: MemoryLimit) -> bool:
        """Whether every rank stays within the limit."""
        peaks = self.timeline.peak_memory
        return fits(peaks, limits_per_rank(limit, len(peaks)))


def best_variant(
    plain: Timeline, costs: Costs, limit: MemoryLimit, objective: str, kept: float = KEPT
) -> Variant | None:
    """The variant that fits and takes the least time, with the fewest changes; None if none fits."""
    fitting = [each for each in variants(plain, costs, limit, kept) if each.fits(limit)]
    return min(
        fitting, key=lambda each: float(f"{objective_value(each.timeline, objective):.9g}"), default=None
    )


def variants(plain: Timeline, costs: Costs, limit: MemoryLimit, kept: float = KEPT) -> list[Variant]:
    """The plan as it is; with offload, recompute and both, as far as costs and limit ask for them."""
    found = [Variant(plain)]
    for is_offloaded in (False, True) if costs.has_host else (False,):
        if is_offloaded:
            found.append(_Beside(plain.timetable, costs, kept, is_offloaded=True).variant(frozenset()))
        if limit is None or found[-1].fits(limit):
            continue
        chosen = _Beside(plain.timetable, costs, kept, is_offloaded=is_offloaded).recomputed(limit)
        found += [chosen] if chosen is not None else []
    return found


class _Beside:
    """One timetable with offload or without, and any of its stages recomputed."""

    def __init__(self, timetable: Timetable, costs: Costs, kept: float, *, is_offloaded: bool) -> None:
        self._timetable, self._costs, self._kept = timetable, costs, kept
        self._is_offloaded = is_offloaded
        self._given = costs.per_stage(timetable.num_stages)

    def variant(self, chosen: Stages) -> Variant:
        """The timetable's variant in which these stages are recomputed."""
        costs = self._with(chosen)
        offload = self._offload(chosen)
        timeline = simulate(self._timetable, costs, offload)
        peaks = tuple(self._peak(rank, chosen, offload) for rank in range(self._timetable.num_ranks))
        return Variant(replace(timeline, peak_memory=peaks), self._is_offloaded, chosen)

    def recomputed(self, limit: MemoryLimit) -> Variant | None:
        """The stages that have to be recomputed; None if that is not enough."""
        timetable = self._timetable
        if max(map(timetable.rank_of.count, range(timetable.num_ranks))) > _MOST_STAGES:
            return self.variant(frozenset(range(timetable.num_stages)))
        offload = cache(self._offload)

        def peak(rank: int, chosen: Stages) -> float:
            return self._peak(rank, chosen, offload(chosen))

        def step(chosen: Stages) -> float:
            return simulate(timetable, self._with(chosen), offload(chosen)).makespan

        limits = limits_per_rank(limit, timetable.num_ranks)
        unit = self._costs.memory_unit
        try:
            chosen = cheapest_recompute(timetable.rank_of, peak, step, limits, unit, most_tried=_MOST_TRIED)
        except LimitTooLow:
            return None
        return self.variant(chosen)

    def _with(self, chosen: Stages) -> Costs:
        given = self._given
        saved = [self._kept * size for size in given.held["saved"]]
        host = [0.0 if stage in chosen else time for stage, time in enumerate(given.host)]
        num_stages = self._timetable.num_stages
        return replace(with_recompute(self._costs, chosen, num_stages, saved), host=host)

    def _offload(self, chosen: Stages) -> Sequence[RankOffload]:
        if not self._is_offloaded:
            return ()
        costs = self._with(chosen)
        return choose_offload(simulate(self._timetable, costs), costs)

    def _peak(self, rank: int, chosen: Stages, offload: Sequence[RankOffload]) -> float:
        """The peak of a rank; a recomputed stage holds all of a microbatch again while its B runs."""
        costs = self._with(chosen).per_stage(self._timetable.num_stages)
        own = [stage for stage in chosen if self._timetable.rank_of[stage] == rank]
        again = max(((1 - self._kept) * self._given.held["saved"][stage] for stage in own), default=0.0)
        row = self._timetable.rows[rank]
        return peak_memory(row, costs, offload[rank] if offload else ()) + again

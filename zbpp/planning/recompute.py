"""Which stages compute their activations again, so that everything fits at least cost.

A stage that recomputes keeps little from F until B, and its B takes its F longer. `cheapest_recompute`
chooses the stages. A rank's memory depends on its own stages alone, and no step gets shorter by more work. So
only those sets of a rank's stages count that fit and of which no smaller part fits. Among them the shortest
step wins: exactly, while there are few; rank by rank in turns, where there are many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import prod

from zbpp.planning.memory_limit import memory_text
from zbpp.schedule.costs import Costs
from zbpp.schedule.timetable import Op, PlanError

_MOST_TRIED = 1024  # combinations of all ranks' sets
Stages = frozenset[int]


def with_recompute(
    costs: Costs, stages: Iterable[int], num_stages: int, saved: Sequence[float] = ()
) -> Costs:
    """The costs with the F of these stages added to their B and BW; saved: what they keep then, per stage.

    saved empty: memory stays as it is.
    """
    chosen, times = set(stages), costs.per_stage(num_stages)
    f = [time if stage in chosen else 0.0 for stage, time in enumerate(times.duration[Op.F])]
    changes = {
        name: [time + more for time, more in zip(times.duration[op], f, strict=True)]
        for name, op in (("b", Op.B), ("bw", Op.BW))
    }
    if saved:
        kept = times.memory[Op.F]
        changes["saved"] = [saved[each] if each in chosen else kept[each] for each in range(num_stages)]
    return replace(costs, **changes)


class LimitTooLow(PlanError):
    """No choice of stages fits. least: what each rank needs at least."""

    def __init__(self, message: str, least: Sequence[float]) -> None:
        super().__init__(message)
        self.least = list(least)


def cheapest_recompute(
    rank_of: Sequence[int],
    peak: Callable[[int, Stages], float],
    step: Callable[[Stages], float],
    limits: Sequence[float],
    unit: str,
    most_tried: int = _MOST_TRIED,
) -> Stages:
    """The stages to recompute: every rank fits, and the step is the shortest.

    rank_of[stage]: the placement. peak(rank, stages): what a rank holds at most if these of its stages
    recompute. step(stages): how long a step takes then. limits: one per rank. most_tried: combinations of all
    ranks' sets, above which ranks choose in turns.
    Raises LimitTooLow if a rank doesn't fit, whatever is recomputed.
    """
    least: list[float] = []
    options: list[list[Stages]] = []
    for rank, limit in enumerate(limits):
        own = [stage for stage, owner in enumerate(rank_of) if owner == rank]
        peaks = {chosen: peak(rank, chosen) for chosen in _subsets(own)}
        least.append(min(peaks.values()))
        options.append(_smallest([chosen for chosen in peaks if peaks[chosen] <= limit]))
    if not all(options):
        needed = ", ".join(memory_text(each, unit) for each in least)
        raise LimitTooLow(
            f"no choice of stages to recompute fits; the least that does, per rank: {needed}", least
        )
    if prod(map(len, options)) <= most_tried:
        return min((_united(each) for each in product(*options)), key=lambda each: _worth(each, step))
    return _in_turns(options, step)


def _subsets(stages: Sequence[int]) -> list[Stages]:
    return [frozenset(each) for size in range(len(stages) + 1) for each in combinations(stages, size)]


def _smallest(fitting: Sequence[Stages]) -> list[Stages]:
    """The sets of which no smaller part is among them."""
    return [each for each in fitting if not any(other < each for other in fitting)]


def _united(sets: Iterable[Stages]) -> Stages:
    return frozenset().union(*sets)


def _worth(stages: Stages, step: Callable[[Stages], float]) -> tuple[float, int, list[int]]:
    return step(stages), len(stages), sorted(stages)


def _in_turns(options: list[list[Stages]], step: Callable[[Stages], float]) -> Stages:
    """Choose rank by rank what is best beside the other ranks' choices, until none changes."""
    chosen = [min(each, key=len) for each in options]
    while True:
        before = list(chosen)
        for rank, own in enumerate(options):
            rest = [*chosen[:rank], *chosen[rank + 1 :]]
            chosen[rank] = min(own, key=lambda each: _worth(_united([*rest, each]), step))
        if chosen == before:
            return _united(chosen)

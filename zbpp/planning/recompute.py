"""Chooses the stages that recompute their activations, so that every rank fits and the step is the shortest.

A stage that recomputes keeps little from F until B, and its B takes longer by the time of F.
`cheapest_recompute` chooses the stages. A rank's memory depends on its own stages alone, and more recompute
never makes the step shorter. So for each rank, a set of its stages is a candidate if the rank fits with it
and with no proper subset of it. If the ranks' candidates have few combinations, all of them are tried, and
the shortest step wins. If they have many, the ranks choose in turns, which may miss the shortest step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import prod

from zbpp.planning.memory_limit import memory_text
from zbpp.schedule.costs import Costs
from zbpp.schedule.timetable import Op, PlanError

_MOST_TRIED = 1024  # combinations of the ranks' candidate sets
Stages = frozenset[int]


def with_recompute(
    costs: Costs, stages: Iterable[int], num_stages: int, saved: Sequence[float] = ()
) -> Costs:
    """The costs when these stages recompute: the time of F is added to their B and BW.

    saved: for each stage, the memory that it keeps from F until B if it recomputes; empty: as in `costs`.
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
    """No choice of stages to recompute fits. least: the least memory that each rank needs."""

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
    """The stages to recompute so that every rank fits, and the step is the shortest.

    rank_of[stage]: the placement. peak(rank, stages): the most that a rank holds if these of its stages
    recompute. step(stages): the time of a step if these stages recompute. limits: one per rank. most_tried:
    if the candidate sets of all ranks have more combinations than this, the ranks choose in turns.
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
        return min((_united(each) for each in product(*options)), key=lambda each: _sort_key(each, step))
    return _in_turns(options, step)


def _subsets(stages: Sequence[int]) -> list[Stages]:
    return [frozenset(each) for size in range(len(stages) + 1) for each in combinations(stages, size)]


def _smallest(fitting: Sequence[Stages]) -> list[Stages]:
    """The sets that have no proper subset among `fitting`."""
    return [each for each in fitting if not any(other < each for other in fitting)]


def _united(sets: Iterable[Stages]) -> Stages:
    return frozenset().union(*sets)


def _sort_key(stages: Stages, step: Callable[[Stages], float]) -> tuple[float, int, list[int]]:
    """The shortest step first; of equal steps, the fewest stages."""
    return step(stages), len(stages), sorted(stages)


def _in_turns(options: list[list[Stages]], step: Callable[[Stages], float]) -> Stages:
    """Let each rank in turn choose its best set beside the other ranks' sets, until no rank changes."""
    chosen = [min(each, key=len) for each in options]
    while True:
        before = list(chosen)
        for rank, own in enumerate(options):
            rest = [*chosen[:rank], *chosen[rank + 1 :]]
            chosen[rank] = min(own, key=lambda each: _sort_key(_united([*rest, each]), step))
        if chosen == before:
            return _united(chosen)

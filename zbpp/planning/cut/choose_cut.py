"""The cut, the placement and the timetable that take the least time on given ranks, within their memory.

Layers need not be cut evenly: a rank of speed 2 should have twice the work, and a rank with little memory few
layers. Under a V or a loop it also matters which of a rank's two stages has them, so balanced loads are not
enough: the time of the whole timetable is the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np

from zbpp.partition import partition
from zbpp.planning.bounds import bound_of
from zbpp.planning.cut.cut_timing import CutTiming, Layers
from zbpp.planning.cut.cuts import MOST_CUTS, all_cuts, cut_by_shares, improved, number_of_cuts
from zbpp.planning.longest_paths import Floats, Numbers
from zbpp.planning.memory_limit import MemoryLimit, ceiling, check_fits, limits_per_rank
from zbpp.planning.options import EQUAL, check_count
from zbpp.planning.placement import PLACEMENTS
from zbpp.planning.plan import placement_of, plan
from zbpp.planning.problem import Problem
from zbpp.planning.search.deadline import Deadline
from zbpp.planning.search.local_search import LocalSearch
from zbpp.schedule.costs import Costs
from zbpp.schedule.families import FAMILIES
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import PlanError, Timetable

Progress = Callable[[float, str], None]

_NUMBERS = 4_000_000  # ends of actions that are computed at once


@dataclass(frozen=True)
class ChosenCut:
    """A cut and how it runs.

    layers_per_stage: how many layers each stage has. schedule: a name that `plan` knows; zb_auto: the search
    has found the timetable. costs: of the stages, at their ranks' speeds. makespan, bound: ms; no timetable
    with this cut and placement takes less than the bound. even: the makespan (ms) of the best timetable for
    a cut into stages of equal work, infinity if none fits. is_exact: whether every cut was compared under
    every family; else a local search has compared some of them.
    """

    layers_per_stage: tuple[int, ...]
    placement: str
    schedule: str
    timetable: Timetable
    costs: Costs
    makespan: float
    bound: float
    even: float
    is_exact: bool


class _Candidate(NamedTuple):
    """A cut under a timetable. worth: its makespan (ms) if it fits, else more than any makespan.

    peak: the most that a rank holds.
    """

    worth: float
    fits: bool
    schedule: str
    timetable: Timetable
    cut: tuple[int, ...]
    peak: float

    @property
    def order(self) -> tuple[float, int, float]:
        """A key to sort by: the shorter time wins; among equal times fewer stages, then less memory."""
        return float(f"{self.worth:.9g}"), self.timetable.num_stages, self.peak


class _Judge:
    """A family's timetable, which says how good a cut is.

    compares_all: whether `best_cut` compares every cut.
    """

    def __init__(self, schedule: str, timetable: Timetable, model: Layers, limits: Sequence[float]) -> None:
        self.schedule, self._timetable, self._model = schedule, timetable, model
        self._timing = CutTiming(timetable, model)
        self._ceilings = np.array([ceiling(limit) for limit in limits])[:, None]
        self._never = timetable.num_microbatches * model.serial  # no makespan is longer
        self.compares_all = number_of_cuts(len(model), timetable.num_stages) <= MOST_CUTS

    def best_cut(self) -> _Candidate:
        """The best cut within the limits; if none is within them, the one that exceeds them least."""
        num_stages = self._timetable.num_stages
        if self.compares_all:
            return self._best(all_cuts(len(self._model), num_stages))
        speeds = self._model.speeds[list(self._timetable.rank_of)]
        of_limits = np.minimum(self._ceilings[:, 0], 1e300)[list(self._timetable.rank_of)]
        starts = [cut_by_shares(self._model.work, shares.tolist()) for shares in (speeds, of_limits)]
        return self._best(improved(np.array([*starts, self._even()]), self.worth))

    def even_cut(self) -> _Candidate:
        """The cut whose stages have equal work, as far as layers allow."""
        return self._best(np.array([self._even()]))

    def _even(self) -> list[int]:
        return partition(self._model.work, self._timetable.num_stages)

    def _best(self, cuts: Numbers) -> _Candidate:
        worth = self.worth(cuts)
        at = int(worth.argmin())
        cut, peak = tuple(cuts[at].tolist()), float(self._timing.peaks(cuts[at : at + 1]).max())
        fits = bool(worth[at] <= self._never)
        return _Candidate(float(worth[at]), fits, self.schedule, self._timetable, cut, peak)

    def worth(self, cuts: Numbers) -> Floats:
        """By cut, its makespan (ms). Beyond the limits: more than any makespan, growing with the excess."""
        each = max(1, _NUMBERS // (3 * self._timetable.num_microbatches * self._timetable.num_stages))
        parts = [cuts[first : first + each] for first in range(0, len(cuts), each)]
        return np.concatenate([self._worth(part) for part in parts])

    def _worth(self, cuts: Numbers) -> Floats:
        excess = (self._timing.peaks(cuts) / self._ceilings).max(axis=0)
        return np.where(excess <= 1, self._timing.makespans(cuts), self._never * (1 + excess))


def choose_cut(
    layers: Sequence[Costs],
    speeds: Sequence[float],
    num_microbatches: int,
    memory_limits: MemoryLimit = None,
    placements: Sequence[str] = PLACEMENTS,
    *,
    time_limit: float = 2.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> ChosenCut:
    """Choose how many layers each stage gets, and the placement and timetable that suit.

    layers: costs of each layer, in order, numbers for a rank of speed 1; an embedding and a head are layers,
    too. A stage's costs are the sums over its layers; its messages take the comm of its last layer.
    speeds: of each rank of the pipeline, in order. memory_limits: of each rank, in the unit of the layers'
    saved, deferred and static; None: no limit.
    time_limit: seconds for `zb_auto`'s search of better timetables for the best cuts; 0: families alone.
    progress(share of the work that is done, what is being compared) is called now and then.

    Raises PlanError for what is out of range, for fewer layers than stages, and if no cut is within the
    limits (the message says what the cut needs that exceeds them least).
    """
    check_count("num_microbatches", num_microbatches)
    _check_speeds(speeds)
    unknown = [each for each in placements if each not in PLACEMENTS]
    if unknown or not placements:
        raise PlanError(f"placements={placements!r}: write some of {', '.join(PLACEMENTS)}")
    model, limits = Layers(layers, speeds), limits_per_rank(memory_limits, len(speeds))
    deadline = Deadline(time_limit)
    judges = [
        _Judge(name, timetable, model, limits)
        for name, timetable in _families(len(speeds), num_microbatches, placements)
        if timetable.num_stages <= len(model)
    ]
    if not judges:
        raise PlanError(
            f"no schedule of placements={list(placements)} can run {len(model)} layers on {len(speeds)} "
            f"ranks with {num_microbatches} microbatches: write more of one of them, or placements=['one']"
        )
    compared = []
    for number, judge in enumerate(judges):
        if progress:
            progress(number / len(judges), judge.schedule)
        compared.append(judge.best_cut())
    best = _searched(compared, model, limits, deadline.part(0.5), seed)
    if best is None:
        _refuse(min(compared, key=lambda each: each.worth), model, limits)
    even = _searched([judge.even_cut() for judge in judges], model, limits, deadline.part(1.0), seed)
    costs = model.stage_costs(best.cut, best.timetable.rank_of)
    problem = Problem(best.timetable.rank_of, num_microbatches, costs, memory_limits)
    return ChosenCut(
        layers_per_stage=best.cut,
        placement=placement_of(best.timetable),
        schedule=best.schedule,
        timetable=best.timetable,
        costs=costs,
        makespan=best.worth,
        bound=bound_of(problem).value,
        even=math.inf if even is None else even.worth,
        is_exact=all(judge.compares_all for judge in judges),
    )


def _check_speeds(speeds: Sequence[float]) -> None:
    numbers = list(speeds) if isinstance(speeds, Sequence) else []
    if not numbers or not all(isinstance(each, int | float) and 0 < each < math.inf for each in numbers):
        raise PlanError(f"speeds={speeds!r}: write a number above 0 for each rank")


def _families(
    num_ranks: int, num_microbatches: int, placements: Sequence[str]
) -> Iterator[tuple[str, Timetable]]:
    """The timetables with these placements, of the families that can run so many microbatches."""
    for name in FAMILIES:
        with suppress(PlanError):
            timetable = plan(name, num_ranks, num_microbatches)
            if placement_of(timetable) in placements:
                yield name, timetable


def _searched(
    candidates: Sequence[_Candidate], model: Layers, limits: Sequence[float], deadline: Deadline, seed: int
) -> _Candidate | None:
    """The best that a search of timetables makes of each placement's best candidate; None if none fits."""
    best: dict[str, _Candidate] = {}
    for each in sorted(candidates, key=lambda each: each.order):
        if each.fits:
            best.setdefault(placement_of(each.timetable), each)
    found = [*best.values()]
    for number, each in enumerate(best.values()):
        costs = model.stage_costs(each.cut, each.timetable.rank_of)
        problem = Problem(each.timetable.rank_of, each.timetable.num_microbatches, costs, limits)
        search = LocalSearch(problem, deadline.part(1 / (len(best) - number)), seed)
        timetable = problem.timetable_of(search.run()) if deadline.seconds else each.timetable
        makespan = simulate(timetable, costs).makespan
        if makespan < each.worth * (1 - EQUAL):
            found.append(each._replace(worth=makespan, schedule="zb_auto", timetable=timetable))
    return min(found, key=lambda each: each.order, default=None)


def _refuse(least: _Candidate, model: Layers, limits: Sequence[float]) -> NoReturn:
    """Raise the PlanError for limits that no cut is within."""
    costs = model.stage_costs(least.cut, least.timetable.rank_of)
    peaks = simulate(least.timetable, costs).peak_memory
    check_fits(
        f"{least.schedule} with {list(least.cut)} layers per stage, the least,",
        peaks,
        limits,
        costs.memory_unit,
    )
    raise AssertionError("the judge and the simulator disagree about memory")

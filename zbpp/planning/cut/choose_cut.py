"""The cut, the placement and the timetable that take the least time on given ranks, within their memory.

Layers need not be cut evenly: a rank of speed 2 should have twice the work, and a rank with little memory few
layers. Under a V or a loop it also matters which of a rank's two stages has them, so balanced loads are not
enough: the time of the whole timetable is the judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_MOST_ORDERS = 100  # of ranks that are compared


class CutTooLarge(PlanError):
    """No cut is within the memory limits.

    least: the cut that exceeds them least, and its makespan (ms). peaks: what it needs on each rank.
    """

    def __init__(self, text: str, least: ChosenCut, peaks: Sequence[float]) -> None:
        super().__init__(text)
        self.least, self.peaks = least, list(peaks)


@dataclass(frozen=True)
class ChosenCut:
    """A cut and how it runs.

    layers_per_stage: how many layers each stage has. schedule: a name that `plan` knows; zb_auto: the search
    has found the timetable. costs: of the stages, at their ranks' speeds. makespan, bound: ms; no timetable
    with this cut and placement takes less than the bound. even: the makespan (ms) of the best timetable for
    a cut into stages of equal work, infinity if none fits. ideal: how long the work would take (ms) if no
    rank were ever idle. is_exact: whether every cut was compared under
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
    ideal: float
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
    timetables: Mapping[str, Timetable] | None = None,
    time_limit: float = 2.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> ChosenCut:
    """Choose how many layers each stage gets, and the placement and timetable that suit.

    layers: costs of each layer, in order, numbers for a rank of speed 1; an embedding and a head are layers,
    too. A stage's costs are the sums over its layers; its messages take the comm of its last layer.
    speeds: of each rank of the pipeline, in order. memory_limits: of each rank, in the unit of the layers'
    saved, deferred and static; None: no limit.
    timetables: those to choose from, by the name of their schedule, in place of the families with these
    placements; slices of a sequence count as equally long.
    time_limit: seconds for `zb_auto`'s search of better timetables for the best cuts; 0: families alone.
    progress(share of the work that is done, what is being compared) is called now and then.

    Raises PlanError for what is out of range, for fewer layers than stages, and if no cut is within the
    limits (CutTooLarge: its message says what the cut needs that exceeds them least).
    """
    check_count("num_microbatches", num_microbatches)
    _check_speeds(speeds)
    unknown = [each for each in placements if each not in PLACEMENTS]
    if unknown or not placements:
        raise PlanError(f"placements={placements!r}: write some of {', '.join(PLACEMENTS)}")
    model, limits = Layers(layers, speeds), limits_per_rank(memory_limits, len(speeds))
    deadline = Deadline(time_limit)
    refusal, instead = f"no schedule of placements={list(placements)} can run", "placements=['one']"
    if timetables is None:
        timetables = timetables_of_families(len(speeds), num_microbatches, placements, is_limited=True)
    else:
        refusal, instead = f"{', '.join(timetables)} can't run", "a schedule with fewer stages"
    judges = [
        _Judge(name, timetable, model, limits)
        for name, timetable in timetables.items()
        if timetable.num_stages <= len(model)
    ]
    if not judges:
        raise PlanError(
            f"{refusal} {len(model)} layers on {len(speeds)} ranks with {num_microbatches} microbatches: "
            f"write fewer ranks, or {instead}"
        )
    compared = []
    for number, judge in enumerate(judges):
        if progress:
            progress(number / len(judges), judge.schedule)
        compared.append(judge.best_cut())
    best = _searched(compared, model, limits, deadline.part(0.5), seed)
    is_exact = all(judge.compares_all for judge in judges)
    if best is None:
        least = min(compared, key=lambda each: each.worth)
        _refuse(_chosen(least, model, None, math.inf, is_exact), limits)
    even = _searched([judge.even_cut() for judge in judges], model, limits, deadline.part(1.0), seed)
    return _chosen(best, model, memory_limits, math.inf if even is None else _makespan(even, model), is_exact)


def _chosen(
    best: _Candidate, model: Layers, memory_limits: MemoryLimit, even: float, is_exact: bool
) -> ChosenCut:
    timetable, costs = best.timetable, model.stage_costs(best.cut, best.timetable.rank_of)
    counts = timetable.num_microbatches, timetable.num_slices
    problem = Problem(timetable.rank_of, counts[0], costs, memory_limits, num_slices=counts[1])
    return ChosenCut(
        layers_per_stage=best.cut,
        placement=placement_of(timetable),
        schedule=best.schedule,
        timetable=timetable,
        costs=costs,
        makespan=_makespan(best, model),
        bound=bound_of(problem).value,
        even=even,
        ideal=counts[0] * sum(model.work) / float(model.speeds.sum()),
        is_exact=is_exact,
    )


def _makespan(candidate: _Candidate, model: Layers) -> float:
    costs = model.stage_costs(candidate.cut, candidate.timetable.rank_of)
    return simulate(candidate.timetable, costs).makespan


def better_order(
    chosen: ChosenCut,
    layers: Sequence[Costs],
    speeds: Sequence[float],
    memory_limits: MemoryLimit = None,
    timetables: Mapping[str, Timetable] | None = None,
    *,
    time_limit: float = 10.0,
) -> tuple[tuple[int, ...], ChosenCut] | None:
    """Another order of the ranks with which a step takes less time, and the cut for it.

    The other arguments are those of which `choose_cut` has made `chosen`; of the timetables those with its
    placement are tried. Returns the ranks in the best order, as they are numbered in `speeds`, with the best
    cut; None if no order is 1 % better. Only ranks of different speed or limit change places. Pipelines with
    more than 100 such orders are left alone, and so are those whose links differ: a link belongs to
    its ranks. No order is tried when `time_limit` (s) is over.
    """
    families = timetables or {chosen.schedule: chosen.timetable}
    alike = {name: each for name, each in families.items() if placement_of(each) == chosen.placement}
    deadline = Deadline(time_limit)
    pairs = [*zip(speeds, limits_per_rank(memory_limits, len(speeds)), strict=True)]
    kinds = {pair: sum(each == pair for each in pairs) for pair in pairs}
    number = math.factorial(len(pairs)) // math.prod(map(math.factorial, kinds.values()))
    links = layers[0].links
    if number == 1 or number > _MOST_ORDERS or (links is not None and links.pairs):
        return None
    best: tuple[tuple[int, ...], ChosenCut] | None = None
    fastest = chosen.makespan * 0.99
    for order in _orders(range(len(pairs)), pairs):
        if deadline.over:
            break
        with suppress(PlanError):
            found = choose_cut(
                layers,
                [speeds[rank] for rank in order],
                chosen.timetable.num_microbatches,
                None if memory_limits is None else [pairs[rank][1] for rank in order],
                timetables=alike,
                time_limit=0,
            )
            if found.makespan < fastest:
                best, fastest = (order, found), found.makespan
    return best


def _orders(ranks: Sequence[int], kinds: Sequence[object]) -> Iterator[tuple[int, ...]]:
    """The orders of these ranks; of orders that differ by ranks of one kind, one."""
    if not ranks:
        yield ()
    for first in {kinds[rank]: rank for rank in reversed(ranks)}.values():
        rest = [rank for rank in ranks if rank != first]
        yield from ((first, *others) for others in _orders(rest, kinds))


def _check_speeds(speeds: Sequence[float]) -> None:
    numbers = list(speeds) if isinstance(speeds, Sequence) else []
    if not numbers or not all(isinstance(each, int | float) and 0 < each < math.inf for each in numbers):
        raise PlanError(f"speeds={speeds!r}: write a number above 0 for each rank")


def timetables_of_families(
    num_ranks: int,
    num_microbatches: int,
    placements: Sequence[str] = PLACEMENTS,
    num_slices: int = 1,
    *,
    is_limited: bool,
) -> dict[str, Timetable]:
    """The timetables with these placements, by name, of the families that can run so many microbatches.

    is_limited: whether memory limits say what is too large. Else nobody has said that ranks can hold more
    activations than under 1F1B, and families that hold more are left out.
    """
    found = {}
    for name in FAMILIES:
        with suppress(PlanError):
            timetable = plan(name, num_ranks, num_microbatches, num_slices=num_slices)
            if placement_of(timetable) in placements and (is_limited or _holds_no_more_than_1f1b(timetable)):
                found[name] = timetable
    return found


def _holds_no_more_than_1f1b(timetable: Timetable) -> bool:
    """Whether no rank holds more activations than there are ranks, each of a microbatch on a rank's share."""
    share = timetable.num_ranks / timetable.num_stages
    costs = Costs(saved=share, deferred=share / 2)
    return max(simulate(timetable, costs).peak_memory) <= ceiling(timetable.num_ranks)


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


def _refuse(least: ChosenCut, limits: Sequence[float]) -> NoReturn:
    """Raise the error for limits that no cut is within."""
    peaks = simulate(least.timetable, least.costs).peak_memory
    what = f"{least.schedule} with {list(least.layers_per_stage)} layers per stage, the least,"
    try:
        check_fits(what, peaks, limits, least.costs.memory_unit)
    except PlanError as error:
        raise CutTooLarge(str(error), least, peaks) from None
    raise AssertionError("the judge and the simulator disagree about memory")

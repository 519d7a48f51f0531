"""`zbpp plan --lengths`: one's own microbatches in the given order, and in the best order found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from zbpp.packing import longest_first
from zbpp.planning import (
    MemoryLimit,
    RankCosts,
    balanced_shares,
    compare,
    order_bound,
    order_microbatches,
    own_path,
    takes_costs,
)
from zbpp.planning.options import check_count
from zbpp.schedule import Costs, PlanError, Timeline, simulate
from zbpp.schedule.interchange import naming
from zbpp.schedule.timetable import shown


def read_lengths(path: str, num_microbatches: int | None) -> list[float]:
    """The lengths in a file: a number a line, or a JSON list.

    Raises OSError, and PlanError that names the file, for fewer of them than num_microbatches (None: any
    number).
    """
    with naming(path):
        text = Path(path).read_text()
        lengths = _numbers(text)
        if len(lengths) < (num_microbatches or 0):
            raise PlanError(f"{len(lengths)} lengths for --microbatches {num_microbatches}")
        Costs.of_lengths(lengths, Costs())  # refuses what is no length
        if not any(lengths):
            raise PlanError("all lengths are 0: there is nothing to plan")
        return lengths


def packed(lengths: Sequence[float], num_microbatches: int | None) -> tuple[list[float], str]:
    """(tokens of each microbatch, a note); where there are more lengths, they are sequences, and packed."""
    if num_microbatches in (None, len(lengths)):
        return [*lengths], ""
    check_count("--microbatches", num_microbatches)
    groups = longest_first(lengths, num_microbatches)
    tokens = [sum(lengths[each] for each in group) for group in groups]
    note = (
        f"{len(lengths)} sequences packed into {num_microbatches} microbatches of {min(tokens):g} to "
        f"{max(tokens):g} tokens; the longest sequence has {max(lengths):g}"
    )
    return tokens, note


def _numbers(text: str) -> list[float]:
    if text.lstrip().startswith("["):
        try:
            numbers: list[float] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"no JSON that can be read: {error}") from None
        return numbers
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(float(line))
            except ValueError:
                raise PlanError(f"line {number}: {shown(line.strip())} is no number") from None
    return found


_SLICES = (2, 4, 8)  # numbers that are tried


class Orders(NamedTuple):
    """A schedule's step in two orders. order[i]: the microbatch that goes i-th in `best`.

    bound: what no order undercuts in this timetable; longest: the own path of the longest microbatch (ms).
    sliced: the makespan in the best order found, by the number of slices that each microbatch is cut into.
    """

    given: Timeline
    best: Timeline
    order: list[int]
    bound: float
    longest: float
    sliced: Mapping[int, float] = MappingProxyType({})

    @property
    def busiest(self) -> float:
        """The work of the busiest rank (ms)."""
        timeline = self.best
        pairs = zip(timeline.starts, timeline.ends, strict=True)
        return max(float((ends - starts).sum()) for starts, ends in pairs)


def ordered(
    names: Sequence[str],
    options: argparse.Namespace,
    costs: RankCosts,
    memory_limit: MemoryLimit,
    progress: Callable[[float, str], None],
) -> dict[str, Orders | PlanError]:
    """For each schedule, its step in the given order and in the best order found."""

    def timeline(name: str, num_slices: int, costs: RankCosts) -> Timeline | PlanError:
        # A schedule that takes no costs may exceed the limit in the given order, and fit in another.
        limit = {"memory_limit": memory_limit} if takes_costs(name) else {}
        return compare(
            [name],
            options.ranks,
            len(costs.lengths),
            costs=costs,
            num_slices=num_slices,
            placement=options.placement,
            time_limit=options.time_limit,
            progress=lambda share, *_: progress(share, "searching"),
            **limit,
        )[name]

    def of(name: str, num_slices: int, costs: RankCosts) -> Orders | PlanError:
        given = timeline(name, num_slices, costs)
        if isinstance(given, PlanError):
            return given
        try:
            return _best(given, costs, memory_limit, options.time_limit)
        except PlanError as error:
            return error

    def with_slices(name: str) -> Orders | PlanError:
        whole = of(name, 1, costs)
        if isinstance(whole, PlanError):
            return whole
        cut = {each: of(name, each, costs.sliced(balanced_shares(each, costs))) for each in _SLICES}
        found = {each: one.best.makespan for each, one in cut.items() if isinstance(one, Orders)}
        return whole._replace(sliced=found)

    return {name: with_slices(name) for name in names}


def _best(given: Timeline, costs: RankCosts, limit: MemoryLimit, time_limit: float) -> Orders:
    timetable = given.timetable
    own = costs.per_stage(timetable.num_stages, timetable.num_ranks)
    order = order_microbatches(timetable, own, time_limit, limit)
    best = simulate(timetable, own.reordered(order))
    bound, longest = order_bound(timetable, own, limit), own_path(timetable.rank_of, own)
    return Orders(given, best, order, bound, longest)


def timelines_of(outcomes: Mapping[str, Orders | PlanError]) -> dict[str, Timeline | PlanError]:
    """What tables and pictures show: two timelines a schedule."""
    shown_as: dict[str, Timeline | PlanError] = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, PlanError):
            shown_as[name] = outcome
        else:
            shown_as[f"{name}, given order"] = outcome.given
            shown_as[f"{name}, best order"] = outcome.best
    return shown_as


def render_orders(name: str, orders: Orders) -> str:
    """What the order brings, and what slices would bring at most."""
    given, best, work = orders.given.makespan, orders.best.makespan, orders.busiest
    found = ", ".join(f"{each} slices {makespan:.5g} ms" for each, makespan in orders.sliced.items())
    sliced = [f"  each microbatch cut into slices that take equally long: {found}"] if found else []
    return "\n".join(
        [
            f"{name}: {given:.5g} ms in the given order, {best:.5g} ms in the best order found: "
            f"{given / best:.3g} times as fast",
            f"  the order: {' '.join(map(str, orders.order))}",
            f"  no order takes less than {orders.bound:.5g} ms in this timetable",
            f"  the busiest rank works {work:.5g} ms in any order, so that cutting the longest into slices "
            f"would bring at most {best - work:.4g} ms more ({1 - work / best:.1%})",
            f"  the longest microbatch alone takes {orders.longest:.5g} ms from its first F to its last B",
            *sliced,
        ]
    )

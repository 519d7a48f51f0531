#!/usr/bin/env python
"""What each component of search and bounds is worth: the same cases in equal time, without one at a time.

    python scripts/dev/ablate.py                      search and bounds: 20 minutes of CPU time
    python scripts/dev/ablate.py search --only anneal
    python scripts/dev/ablate.py bounds               exact, 10 seconds

A component is removed by replacing its functions while the cases run; zbpp has no flags for it. A
component is planned without only on the kinds of case that it can change, "-" elsewhere.

search, in seconds of CPU time of this process, so that other work on the machine changes little:
    cells   the cells of the 40-cell table (one stage per rank, max span) that the first settings of
            list scheduling do not bring to the target: how many are brought there. "list scheduling"
            is also measured on the other ones
    V       makespan in ms of a V at 8 ranks and the memory of 1F1B, three columns of costs
    one, looped, v   heterogeneous instances (heterogeneous.py) of each placement: objective / objective
            of the whole search, geometric mean; above 1: the component helps

bounds: in how many cases the bound falls without the argument, and the proof of optimality with it.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple
from unittest.mock import patch

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from scripts.dev import heterogeneous, targets
from zbpp.planning.bounds import first_backward_bound, idle_bound, lower_bound, relaxed, round_trip_bound
from zbpp.planning.problem import pose
from zbpp.planning.search import (
    anneal,
    deadline,
    evolve,
    fuse_backward,
    initial_orders,
    insert_weight_grads,
    justify,
    list_scheduling,
    local_search,
    periodic_blocks,
    repeat_steady_state,
)
from zbpp.schedule import Costs

bound_module = sys.modules["zbpp.planning.bounds.lower_bound"]  # the package's name for it is the function's
ONE, V, HETEROGENEOUS = "one", "v", "heterogeneous"
EVERYWHERE = (ONE, V, HETEROGENEOUS)
INSTANCES = range(18)
ALL = "everything"


class Component(NamedTuple):
    """What is removed: (owner, attribute, replacement) each; the code it consists of; where it acts."""

    name: str
    replaced: list[tuple[Any, str, Any]]
    code: list[Any]
    acts_on: tuple[str, ...]

    @property
    def lines(self) -> int:
        return sum(len(inspect.getsource(each).splitlines()) for each in self.code)

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, attribute, replacement in self.replaced:
                stack.enter_context(patch.object(owner, attribute, replacement))
            yield


def nothing(*_: object) -> None:
    return None


def empty(*_: object) -> list[Any]:
    return []


def _presets_only(self: Any, runs: int, time: deadline.Deadline, goal: float) -> None:
    for genes in self._first:
        self._try(genes)
        if time.over or self.best.value <= goal:
            return


def _never_late(genes: evolve.Genes, rng: random.Random, original: Any = evolve._mutated) -> evolve.Genes:
    changed: evolve.Genes = original(genes, rng)
    return changed._replace(turn=[10**9] * len(changed.turn))


def _rule(name: str, value: object) -> Component:
    """A priority rule that always has this value."""

    def fixed(problem: Any, original: Any = evolve._presets) -> Iterator[Any]:
        return (genes for genes in original(problem) if getattr(genes.early[0], name) == value)

    names = tuple(each for each in evolve._NAMES if each != name)
    return Component(
        f"rule `{name}` (always {value})",
        [(evolve, "_NAMES", names), (evolve, "_presets", fixed)],
        [],
        (ONE, HETEROGENEOUS),
    )


def search_components() -> list[Component]:
    hunt = local_search.Hunt
    names = tuple(name for name in evolve._NAMES if name != "cap")
    return [
        Component(ALL, [], [], EVERYWHERE),
        Component(
            "paper's planner as a start",
            [(initial_orders, "planned", empty)],
            [initial_orders.planned],
            (ONE, HETEROGENEOUS),
        ),
        Component(
            "list scheduling", [(hunt, "_evolve", nothing)], [list_scheduling, evolve], (ONE, HETEROGENEOUS)
        ),
        Component(
            "evolving its settings",
            [(evolve.Population, "advance", _presets_only)],
            [evolve._mutated, evolve._changed, evolve.Population._child, evolve.Population._try],
            (ONE, HETEROGENEOUS),
        ),
        Component(
            "other settings for late F's",
            [(evolve, "_mutated", _never_late), (evolve, "_late_from", lambda problem, rank: 10**9)],
            [evolve._late_from],
            (ONE, HETEROGENEOUS),
        ),
        Component("rule `cap` (always 2(p - r) - 1)", [(evolve, "_NAMES", names)], [], (ONE, HETEROGENEOUS)),
        _rule("forward", True),
        _rule("strict", False),
        _rule("frees", True),
        _rule("patience", 0.3),
        _rule("budget", 1.0),
        Component("new populations", [(local_search, "_STALE", math.inf)], [], (ONE, HETEROGENEOUS)),
        Component(
            "insert W's into orders",
            [(local_search, "starts", empty)],
            [insert_weight_grads, initial_orders.starts, initial_orders._tried, initial_orders.orders],
            EVERYWHERE,
        ),
        Component(
            "orders of families",
            [(initial_orders, "_family_order", lambda family, problem: [])],
            [initial_orders._family_order],
            EVERYWHERE,
        ),
        Component(
            "periodic blocks", [(initial_orders, "blocks", empty)], [periodic_blocks], (V, HETEROGENEOUS)
        ),
        Component("eagerness 0.5 and 0", [(initial_orders, "_EAGERNESS", (1.0,))], [], EVERYWHERE),
        Component("justify", [(local_search, "justify", nothing)], [justify], EVERYWHERE),
        Component(
            "justify to the right", [(justify, "push_right", nothing)], [justify.push_right], EVERYWHERE
        ),
        Component("annealing", [(local_search, "anneal", nothing)], [anneal], EVERYWHERE),
        Component("temperature", [(local_search, "_WARMTH", (0.0,))], [], EVERYWHERE),
        Component("moves from the critical path", [(anneal, "_CRITICAL", 0.0)], [], EVERYWHERE),
        Component("a pool of plans (1 instead of 6)", [(local_search, "_POOL", 1)], [], EVERYWHERE),
        Component(
            "repeat the steady state",
            [(hunt, "_stretch", nothing)],
            [repeat_steady_state],
            (V, HETEROGENEOUS),
        ),
        Component(
            "join and split BW",
            [(local_search, "join", nothing), (anneal, "foldable", empty)],
            [fuse_backward],
            (HETEROGENEOUS,),
        ),
        Component("join alone", [(local_search, "join", nothing)], [fuse_backward.join], (HETEROGENEOUS,)),
        Component("split or join at random", [(anneal, "foldable", empty)], [], (HETEROGENEOUS,)),
        Component(
            "rule `whole`",
            [(evolve, "_NAMES", tuple(name for name in evolve._NAMES if name != "whole"))],
            [],
            (HETEROGENEOUS,),
        ),
    ]


def is_easy(cell: targets.Cell) -> bool:
    """Whether the first settings of list scheduling reach the target."""
    problem = pose(
        cell.num_ranks, cell.num_microbatches, cell.costs, cell.memory, cell.placement, None, cell.objective
    )
    bound = lower_bound(
        cell.objective,
        rank_of=problem.rank_of,
        num_microbatches=cell.num_microbatches,
        costs=cell.costs,
        memory_limit=cell.memory,
    )
    settings = evolve.Population(problem, bound.value, random.Random(0))
    _presets_only(settings, 0, deadline.Deadline(math.inf), bound.value)
    work = cell.num_microbatches * sum(problem.duration[:3])
    return round(1 - work / settings.best.value, 4) <= cell.target


class Result(NamedTuple):
    """Of one component's removal; times in ms by case."""

    reached: str
    v: dict[str, float]
    drawn: dict[int, float]
    seconds: float


def measure(
    component: Component, hard: list[targets.Cell], easy: list[targets.Cell], scale: float, seed: int
) -> Result:
    begin = process_time()
    with component.removed(), patch.object(deadline, "monotonic", process_time):
        cells = (
            (hard + easy if component.name == "list scheduling" else hard) if ONE in component.acts_on else []
        )
        met = [targets.solve(cell, 2.5 * scale, seed).is_met for cell in track_(cells, component.name)]
        v = {
            cell.name: targets.solve(cell, 4 * scale, seed).ours
            for cell in track_([each for each in targets.in_a_v() if "1p" in each.name], component.name)
            if V in component.acts_on
        }
        drawn = {}
        for instance in track_(list(map(heterogeneous.draw, INSTANCES)), component.name):
            if _acts_on(component, instance):
                found = instance.planned("zb_auto", time_limit=scale, seed=seed)
                drawn[instance.seed] = heterogeneous.simulate(found, instance.costs).makespan
    reached = f"{sum(met)}/{len(met)}" if cells else "-"
    return Result(reached, v, drawn, process_time() - begin)


def _acts_on(component: Component, instance: heterogeneous.Instance) -> bool:
    everywhere = component.acts_on in (EVERYWHERE, (HETEROGENEOUS,))
    return (
        everywhere
        or instance.placement in component.acts_on
        or (V in component.acts_on and instance.placement == "looped")
    )


def track_(items: list[Any], what: str) -> Iterator[Any]:
    return iter(track(items, console=Console(stderr=True), transient=True, description=what))


def row(component: Component, result: Result, whole: Result) -> str:
    shown = [f"{result.v[name]:.1f}" if name in result.v else "-" for name in whole.v]
    v = "".join(f"{each:>8}" for each in shown)
    ratios = "".join(
        f"{_ratio(result.drawn, whole.drawn, placement):>8}" for placement in ("one", "looped", "v")
    )
    return (
        f"{component.name:<34}{component.lines or '':>5}{result.reached:>7}{v}{ratios}{result.seconds:>7.0f}"
    )


def _ratio(values: dict[int, float], whole: dict[int, float], placement: str) -> str:
    logs = [
        math.log(value / whole[seed])
        for seed, value in values.items()
        if heterogeneous.draw(seed).placement == placement
    ]
    return f"{math.exp(sum(logs) / len(logs)):.4f}" if logs else "-"


def ablate_search(only: str, scale: float, seed: int) -> None:
    cells = list(targets.one_per_rank())
    hard = [cell for cell in track_(cells, "which cells are easy") if not is_easy(cell)]
    easy = [cell for cell in cells if cell not in hard]
    print(f"easy, left out: {len(easy)} cells; the others: {', '.join(cell.name for cell in hard)}")
    print(
        f"time limits {2.5 * scale:g} s a cell, {4 * scale:g} s a V, {scale:g} s an instance "
        f"({INSTANCES[0]} to {INSTANCES[-1]}); seed {seed}"
    )
    columns = f"{'V at 1.0p, m = 24':>24}{'m = 64':>24}{'one':>8}{'looped':>8}{'v':>8}{'s':>7}"
    print(f"{'without':<34}{'lines':>5}{'cells':>7}{columns}")
    whole, *components = search_components()
    results = measure(whole, hard, [], scale, seed)
    print(row(whole, results, results), flush=True)
    for component in components:
        if only in component.name:
            print(row(component, measure(component, hard, easy, scale, seed), results), flush=True)


# ---------------------------------------------------------------- bounds


class BoundCase(NamedTuple):
    kind: str
    arguments: dict[str, Any]


def bound_cases() -> Iterator[BoundCase]:
    """The cells, the V's, 100 heterogeneous pipelines, and pipelines with less memory than 1F1B needs."""
    cells = list(targets.one_per_rank())
    for cell in (*cells, *targets.in_a_v()):
        kind = "cells" if cell.placement == ONE else "V"
        yield _bound_case(
            kind, cell.placement, cell.num_ranks, cell.num_microbatches, cell.costs, cell.memory
        )
    for instance in map(heterogeneous.draw, range(100)):
        shape = (instance.placement, instance.num_ranks, instance.num_microbatches)
        yield _bound_case(
            instance.placement, *shape, instance.costs, instance.memory_limit, instance.stages_per_rank
        )
    for share in (0.25, 0.5, 0.75):
        for cell in cells[::5]:
            memory = share * cell.num_ranks
            yield _bound_case(f"low {ONE}", ONE, cell.num_ranks, cell.num_microbatches, cell.costs, memory)
        for f, b, w, comm in targets.COLUMNS:
            costs = Costs(f=f / 2, b=b / 2, w=w / 2, comm=comm, saved=0.5, deferred=0.25)
            for placement in ("looped", V):
                yield _bound_case(f"low {placement}", placement, 8, 24, costs, share * 8, 2)


def _bound_case(
    kind: str,
    placement: str,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    memory_limit: float | list[float] | None,
    stages_per_rank: int = 1,
) -> BoundCase:
    there = tuple(range(num_ranks))
    return BoundCase(
        kind,
        {
            "objective": "span" if kind == "cells" else "makespan",
            "rank_of": there + there[::-1] if placement == V else there * stages_per_rank,
            "num_microbatches": num_microbatches,
            "costs": costs,
            "memory_limit": memory_limit,
        },
    )


def bound_components() -> list[Component]:
    def zero(*_: object) -> float:
        return 0.0

    def floor(problem: object, idles: object, objective: object, floor: float) -> float:
        return floor

    def none_follows(problem: Any, objective: str) -> list[float]:
        return [0.0] * problem.num_ranks

    def unordered(self: Any) -> list[tuple[float, float]]:
        return [(stage.saved, stage.f) for stage in self.stages]

    def uncut(self: Any) -> float:
        return max(0.0, self.limit - sum(stage.saved for stage in self.stages))

    idle = idle_bound.Idle
    return [
        Component("late first B's", [(bound_module, "late_first_b", floor)], [first_backward_bound], ()),
        Component("round trips", [(bound_module, "round_trips", zero)], [round_trip_bound], ()),
        Component(
            "round trips: relay",
            [(round_trip_bound, "_relay", zero)],
            [round_trip_bound._relay, round_trip_bound._ways, round_trip_bound._room],
            (),
        ),
        Component(
            "round trips: Little's law", [(round_trip_bound, "_little", zero)], [round_trip_bound._little], ()
        ),
        Component("round trips: area", [(round_trip_bound, "_area", zero)], [round_trip_bound._area], ()),
        Component("idle: head", [(idle, "head", 0.0)], [], ()),
        Component("idle: tail", [(relaxed.Relaxed, "after_last_f", lambda self, rank: -math.inf)], [], ()),
        Component("idle: what follows", [(bound_module, "what_follows", none_follows)], [], ()),
        Component(
            "idle: F's of a rank's stages in order",
            [(idle, "_forward_blocks", unordered)],
            [idle._forward_blocks],
            (),
        ),
        Component(
            "idle: whole units of memory", [(idle, "_room_for_others", uncut)], [idle._room_for_others], ()
        ),
    ]


def ablate_bounds(only: str) -> None:
    cases = list(bound_cases())
    kinds = Counter(case.kind for case in cases)
    whole = [lower_bound(**case.arguments).value for case in cases]
    print("cases whose bound falls without the argument (and the largest fall)")
    print(
        f"{'without':<34}{'lines':>5}"
        + "".join(f"{f'{kind} ({number})':>16}" for kind, number in kinds.items())
    )
    for component in bound_components():
        if only not in component.name:
            continue
        with component.removed():
            without = [lower_bound(**case.arguments).value for case in cases]
        columns = ""
        for kind in kinds:
            falls = [1 - b / a for a, b, case in zip(whole, without, cases, strict=True) if case.kind == kind]
            fallen = [fall for fall in falls if fall > 1e-9]
            columns += f"{f'{len(fallen)} ({max(fallen):.1%})' if fallen else '-':>16}"
        print(f"{component.name:<34}{component.lines or '':>5}{columns}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="search, bounds; both by default")
    parser.add_argument("--only", default="", metavar="TEXT", help="components named so")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the time limits; 1")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tables: dict[str, Callable[[], None]] = {
        "bounds": lambda: ablate_bounds(options.only),
        "search": lambda: ablate_search(options.only, options.scale, options.seed),
    }
    if unknown := set(options.tables) - set(tables):
        parser.error(f"no table {', '.join(sorted(unknown))}: write search or bounds")
    for name in options.tables or tables:
        tables[name]()


if __name__ == "__main__":
    main()

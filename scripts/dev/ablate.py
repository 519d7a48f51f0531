#!/usr/bin/env python
"""What each component of search and bounds is worth: the same cases in equal time, without one at a time.

    python scripts/dev/ablate.py                          search and bounds: 15 minutes of CPU time
    python scripts/dev/ablate.py search --only justify
    python scripts/dev/ablate.py bounds                   20 seconds

A component is removed by replacing its functions while the cases run; zbpp has no flags for it. Time is
CPU time of this process, so that other work on the machine changes little. A component is removed only
for the cases that it can change ("-" elsewhere).

search:
    cells   of the 40 cells (one stage per rank, max span), those that the first rules of list
            scheduling do not bring to the target: how many are brought there. "list scheduling" is
            measured on the other cells, too
    V       makespan (ms) of a V at 8 ranks: three columns of costs with 24 microbatches and 1F1B's memory
            (1.0p); the third column at 0.75p with 24 and with 96 microbatches
    one, looped, v   heterogeneous instances (heterogeneous.py) of each placement: objective / objective of
            the whole search, geometric mean; above 1 the component helps
bounds: in how many cases the bound falls without the argument, and the largest fall (ablate_bounds.py).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from scripts.dev import heterogeneous, targets
from scripts.dev.ablate_bounds import Component, ablate_bounds
from zbpp.planning.bounds import bound_of
from zbpp.planning.search import (
    deadline,
    evolve,
    fuse_backward,
    initial_orders,
    insert_weight_grads,
    justify,
    list_scheduling,
    local_search,
    random_moves,
)
from zbpp.schedule import simulate

ONE, LOOPED, V = "one", "looped", "v"
INSTANCES = range(18)  # seeds
CELL, IN_V, INSTANCE = 2.5, 4.0, 1.0  # seconds
T = TypeVar("T")


def components() -> list[Component]:
    search, anywhere = local_search.LocalSearch, (ONE, LOOPED, V)
    population, orders = evolve.Population, initial_orders
    return [
        Component("paper's planner as a start", [(orders, "_by_paper_planner", _empty)], acts_on=(ONE,)),
        Component(
            "list scheduling",
            [(search, "_schedule_lists", _nothing)],
            (list_scheduling, evolve),
            acts_on=(ONE,),
        ),
        Component(
            "evolving rules",
            [(population, "advance", _first_rules_only)],
            (evolve._mutated, evolve._neighbours, population._child, population._try),
            acts_on=(ONE,),
        ),
        Component("new populations", [(local_search, "_MOST_STALE", math.inf)], acts_on=(ONE,)),
        Component(
            "inserting W's into orders",
            [(local_search, "rebuilt_plans", _empty)],
            (insert_weight_grads, orders.rebuilt_plans, orders._ranked, orders.orders, orders._family_order),
            anywhere,
        ),
        Component("orders of families", [(orders, "_family_order", _empty)], (), anywhere),
        Component("least waits of 0.5 and 0", [(orders, "_LEAST_WAITS", (1.0,))], (), anywhere),
        Component("justify", [(local_search, "justify", _nothing)], (justify,), anywhere),
        Component("justify to the right", [(justify, "push", _left_only)], (), anywhere),
        Component("random moves", [(local_search, "move_at_random", _nothing)], (random_moves,), anywhere),
        Component("moves from the critical path", [(random_moves, "_CRITICAL", 0.0)], (), anywhere),
        Component("a pool of 6 plans instead of 1", [(local_search, "_POOL", 1)], (), anywhere),
        Component(
            "fusing and splitting BW",
            [(local_search, "fuse_all", _nothing), (random_moves, "fusible", _empty)],
            (fuse_backward,),
            anywhere,
        ),
    ]


def _nothing(*_: object) -> None:
    return None


def _empty(*_: object) -> list[Any]:
    return []


def _first_rules_only(self: evolve.Population, runs: int, time: deadline.Deadline, goal: float) -> None:
    for rules in self._first:
        self._try(rules)
        if time.over or self.best.value <= goal:
            return


def _left_only(timing: Any, paths: Any, step: int, time: Any, original: Any = justify.push) -> None:
    if step == justify._LEFT:
        original(timing, paths, step, time)


# ---------------------------------------------------------------- measuring


class Measured(NamedTuple):
    """Cells at target, makespans (ms) by V and by seed of the instance, and CPU seconds."""

    cells: str
    in_v: dict[str, float]
    instances: dict[int, float]
    seconds: float


def measure(component: Component, cells: list[targets.Cell], scale: float, seed: int) -> Measured:
    """All cases that the component acts on, without it."""
    begin, name = process_time(), component.name
    with component.removed(), patch.object(deadline, "monotonic", process_time):
        found = [targets.solve(cell, CELL * scale, seed).is_met for cell in _shown(cells, name)]
        in_v = {
            cell.name: targets.solve(cell, IN_V * scale, seed).ours
            for cell in _shown(list(_in_v()) if V in component.acts_on else [], name)
        }
        instances = {}
        for instance in _shown([heterogeneous.draw(each) for each in INSTANCES], name):
            if instance.placement in component.acts_on:
                plan = instance.planned("zb_auto", time_limit=INSTANCE * scale, seed=seed)
                instances[instance.seed] = simulate(plan, instance.costs).makespan
    at_target = f"{sum(found)}/{len(found)}" if found else "-"
    return Measured(at_target, in_v, instances, process_time() - begin)


def _in_v() -> Iterator[targets.Cell]:
    table = {(cell.num_microbatches, cell.memory): cell for cell in targets.in_a_v()}  # the third column
    yield from list(targets.in_a_v())[:3]
    low = table[24, 6.0]
    yield from (low, low._replace(name=low.name.replace("m=24", "m=96"), num_microbatches=96))


def _shown(items: list[T], name: str) -> Iterator[T]:
    return iter(track(items, console=Console(stderr=True), transient=True, description=name))


def is_easy(cell: targets.Cell) -> bool:
    """Whether the first rules of list scheduling reach the target."""
    problem = targets.problem_of(cell)
    bound = bound_of(problem).value
    population = evolve.Population(problem, bound, random.Random(0))
    _first_rules_only(population, 0, deadline.Deadline(math.inf), bound)
    work = cell.num_microbatches * sum(problem.duration[:3])
    return cell.target is not None and round(1 - work / population.best.value, 4) <= cell.target


# ---------------------------------------------------------------- the table


def ablate_search(only: str, scale: float, seed: int) -> None:
    """Print the table for the components whose name contains `only`."""
    cells = list(targets.one_per_rank())
    hard = [cell for cell in _shown(cells, "which cells are easy") if not is_easy(cell)]
    print(f"easy, left out: {len(cells) - len(hard)} cells; the others: {', '.join(c.name for c in hard)}")
    limits = f"{CELL * scale:g} s a cell, {IN_V * scale:g} s a V, {INSTANCE * scale:g} s an instance"
    print(f"time limits {limits} ({INSTANCES[0]} to {INSTANCES[-1]}); seed {seed}")
    columns = f"{'V at 1.0p':>24}{'V at .75p':>16}{ONE:>8}{LOOPED:>8}{V:>8}{'s':>7}"
    print(f"{'without':<34}{'lines':>5}{'cells':>7}{columns}")
    whole = measure(Component("nothing", [], (), (ONE, LOOPED, V)), hard, scale, seed)
    print(_line("nothing", 0, whole, whole), flush=True)
    for component in components():
        if only in component.name:
            searched = (
                cells if component.name == "list scheduling" else hard if ONE in component.acts_on else []
            )
            measured = measure(component, searched, scale, seed)
            print(_line(component.name, component.lines, measured, whole), flush=True)


def _line(name: str, lines: int, measured: Measured, whole: Measured) -> str:
    in_v = [f"{measured.in_v[cell]:.1f}" if cell in measured.in_v else "-" for cell in whole.in_v]
    ratios = [_ratio(measured.instances, whole.instances, placement) for placement in (ONE, LOOPED, V)]
    figures = "".join(f"{each:>8}" for each in (*in_v, *ratios))
    return f"{name:<34}{lines or '':>5}{measured.cells:>7}{figures}{measured.seconds:>7.0f}"


def _ratio(values: dict[int, float], whole: dict[int, float], placement: str) -> str:
    seeds = [seed for seed in values if heterogeneous.draw(seed).placement == placement]
    logs = [math.log(values[seed] / whole[seed]) for seed in seeds]
    return f"{math.exp(sum(logs) / len(logs)):.4f}" if logs else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables that are named, or both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="search, bounds; both by default")
    parser.add_argument("--only", default="", metavar="TEXT", help="components with TEXT in their name")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all time limits; 1")
    parser.add_argument("--seed", type=int, default=0, help="of the search; 0")
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

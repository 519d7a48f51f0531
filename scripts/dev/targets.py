#!/usr/bin/env python
"""How good zb_auto's plans are: beside the paper's planner and beside what is proved to be the least.

    one  40 cells, bubble rate by max span: costs of the paper's table, one stage per rank
    v    makespan of a V at 8 ranks: three columns of costs, at and below 1F1B's memory

A cell meets its mark if it is at the target to four digits (one), or not above it (v). The search is
given TIME seconds a cell, of the clock: other work on the machine makes it find less.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from zbpp.planning import certificate, plan
from zbpp.planning.problem import Problem
from zbpp.schedule import Costs, Timeline, simulate

DATA = Path(__file__).resolve().parent.parent.parent / "tests/reference"
COLUMNS = ((10, 10, 10, 0), (10, 12, 7, 1), (10, 16, 8, 2))  # F, B, W, message; ms
# (microbatches, memory in p, what each column is to reach; None: within .6 % of the bound)
V_MARKS = (
    (24, 1.0, (755, 765, 937)),
    (24, 0.75, (775, 825, 1010)),
    (24, 0.625, (805, 860, 1090)),
    (64, 1.0, None),
)


class Cell(NamedTuple):
    """A case and its mark; target None: within .6 % of the bound."""

    name: str
    num_ranks: int
    num_microbatches: int
    costs: Costs
    memory: float
    placement: str
    objective: str
    target: float | None


class Found(NamedTuple):
    """Bubble rates (one) or makespans in ms (v)."""

    cell: Cell
    paper: float | None
    ours: float
    bound: float
    seconds: float

    @property
    def is_met(self) -> bool:
        """Whether the mark is met."""
        mark = self.bound * 1.006 if self.cell.target is None else self.cell.target
        digits = 4 if self.cell.objective == "span" else 6
        return round(self.ours, digits) <= round(mark, digits)


def one_per_rank() -> Iterator[Cell]:
    table, targets = (
        json.loads((DATA / f"zb_{name}.json").read_text()) for name in ("paper_table", "targets")
    )
    named = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    rows = {(row["model"], row["m"]): row for row in named}
    for each in targets["rows"]:
        row = rows[each["model"], each["m"]]
        costs = Costs(f=row["F"], b=row["B"], w=row["W"], comm=row["comm"])
        for limit, target in zip(targets["limits_in_p"], each["target"], strict=True):
            name = f"{row['model']} m={row['m']} {limit:.2f}p"
            yield Cell(name, row["p"], row["m"], costs, limit * row["p"], "one", "span", target)


def in_a_v() -> Iterator[Cell]:
    for num_microbatches, limit, marks in V_MARKS:
        for column, (f, b, w, comm) in enumerate(COLUMNS):
            costs = Costs(f=f / 2, b=b / 2, w=w / 2, comm=comm, saved=0.5, deferred=0.25)
            name = f"F={f} B={b} W={w} c={comm} m={num_microbatches} {limit:g}p"
            target = marks[column] if marks else None
            yield Cell(name, 8, num_microbatches, costs, limit * 8, "v", "makespan", target)


def problem_of(cell: Cell) -> Problem:
    return Problem.placed(
        cell.num_ranks,
        cell.num_microbatches,
        costs=cell.costs,
        memory_limit=cell.memory,
        placement=cell.placement,
        objective=cell.objective,
    )


def solve(cell: Cell, time_limit: float, seed: int) -> Found:
    """Plan a cell by the paper's planner, where there is one, and by search."""

    def planned(search: bool) -> Timeline:
        found = plan(
            "zb_auto",
            cell.num_ranks,
            cell.num_microbatches,
            costs=cell.costs,
            memory_limit=cell.memory,
            placement=cell.placement,
            objective=cell.objective,
            search=search,
            time_limit=time_limit,
            seed=seed,
        )
        return simulate(found, cell.costs)

    paper = worth(planned(False), cell) if cell.placement == "one" else None
    begin = perf_counter()
    timeline = planned(True)
    seconds = perf_counter() - begin
    if max(timeline.peak_memory) > cell.memory * (1 + 1e-9):
        raise AssertionError(f"{cell.name}: {max(timeline.peak_memory)} held, {cell.memory} allowed")
    proof = certificate(timeline.timetable, cell.costs, cell.objective, cell.memory)
    work = cell.num_microbatches * (cell.costs.f + cell.costs.b + cell.costs.w)  # type: ignore[operator]
    bound = 1 - work / proof.bound if cell.objective == "span" else proof.bound
    return Found(cell, paper, worth(timeline, cell), bound, seconds)


def worth(timeline: Timeline, cell: Cell) -> float:
    return timeline.bubble_rate if cell.objective == "span" else timeline.makespan


def line(found: Found) -> str:
    """A row of the table."""
    cell, form = found.cell, ".4f" if found.cell.objective == "span" else ".1f"
    values = (found.paper, found.ours, found.bound, cell.target)
    shown = "".join(f"{'-' if value is None else format(value, form):>9}" for value in values)
    return f"{cell.name:<30}{shown}{found.seconds:>7.1f}  {'met' if found.is_met else 'MISSED'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status says whether no cell is above the paper's planner."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="one, v; both by default")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells named so, such as m=64")
    parser.add_argument(
        "--time-limit", type=float, default=10.0, metavar="TIME", help="seconds of search a cell; 10"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tables = {"one": one_per_rank, "v": in_a_v}
    if unknown := set(options.tables) - set(tables):
        parser.error(f"no table {', '.join(sorted(unknown))}: write one or v")
    cells = [
        each for name in options.tables or tables for each in tables[name]() if options.only in each.name
    ]
    print(f"{'':<30}{'paper':>9}{'ours':>9}{'bound':>9}{'target':>9}{'s':>7}")
    worse, met = 0, 0
    for cell in track(cells, console=Console(stderr=True), transient=True, description="searching"):
        found = solve(cell, options.time_limit, options.seed)
        worse += found.paper is not None and found.ours > found.paper + 1e-9
        met += found.is_met
        print(line(found), flush=True)
    print(f"{met} of {len(cells)} meet their mark; above the paper's planner: {worse}")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())

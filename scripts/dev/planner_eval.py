#!/usr/bin/env python
"""How good zb_auto's plans are, and how long planning takes.

    python scripts/dev/planner_eval.py targets one        40 cells, bubble rate by max span: the paper's costs
    python scripts/dev/planner_eval.py targets v          makespan of a V at 8 ranks: three columns of costs
    python scripts/dev/planner_eval.py random             against every family on random, uneven pipelines
    python scripts/dev/planner_eval.py scale 512 4096     how long plan, simulate and lower take

targets: a cell is met if its value equals the target to four digits (one), or is not above it (v). The search
has --time-limit seconds of the clock per cell, so it finds less on a busy machine.

random: 2 to 8 ranks, p to 4p microbatches, one stage per rank, looped or V; F, B, W, message times and held
bytes drawn per stage. A rank's memory limit is what some family needs, times 1 to 1.3. The table
says whether zb_auto beats the best family that fits, how far it is from the lower bound, and whether it is
proved optimal.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zbpp.planning import SCHEDULES, certificate, plan
from zbpp.planning.options import objective_value
from zbpp.schedule import Costs, PlanError, Timeline, Timetable, lower, simulate
from zbpp.schedule.families import FAMILIES

DATA = Path(__file__).resolve().parents[2] / "tests/reference"
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


def print_targets(options: argparse.Namespace) -> int:
    """Print the table; the exit status says whether no cell is above the paper's planner."""
    cells = [
        each for each in {"one": one_per_rank, "v": in_a_v}[options.table]() if options.only in each.name
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


# ---------------------------------------------------------------- random pipelines


TOLERANCE = 1e-9  # relative: what sums of floats may be off by
GIB = 2.0**30


@dataclass(frozen=True)
class Instance:
    """A pipeline to be planned; memory_limit in bytes per rank, None for no limit."""

    seed: int
    num_ranks: int
    num_microbatches: int
    placement: str
    stages_per_rank: int
    costs: Costs
    memory_limit: list[float] | None

    def planned(self, name: str, **options: object) -> Timetable:
        """As `plan`: raises PlanError where the schedule doesn't fit."""
        if "stages_per_rank" in inspect.signature(SCHEDULES[name]).parameters:
            options["stages_per_rank"] = self.stages_per_rank
        return plan(
            name,
            self.num_ranks,
            self.num_microbatches,
            costs=self.costs,
            memory_limit=self.memory_limit,
            placement=self.placement,
            **options,  # type: ignore[arg-type]
        )

    def rivals(self, objective: str = "makespan") -> dict[str, float]:
        """What each family that fits takes (ms)."""
        found = {}
        for name in FAMILIES:
            try:
                timeline = simulate(self.planned(name), self.costs)
            except PlanError:
                continue
            found[name] = objective_value(timeline, objective)
        return found


@dataclass(frozen=True)
class Outcome:
    """zb_auto on an instance; times in ms."""

    instance: Instance
    family: str
    best_family: float
    value: float
    bound: float
    proved: bool

    @property
    def gap(self) -> float:
        """How far above the lower bound, relative."""
        return max(0.0, self.value / self.bound - 1)

    @property
    def verdict(self) -> str:
        if self.value < self.best_family * (1 - TOLERANCE):
            return "better, optimal" if self.proved else "better"
        equal = self.value <= self.best_family * (1 + TOLERANCE)
        return ("equal, optimal" if self.proved else "EQUAL") if equal else "WORSE"


def draw(seed: int) -> Instance:
    """The instance of a seed; always the same."""
    rng = random.Random(seed)
    num_ranks = rng.randint(2, 8)
    placement = ("one", "looped", "v")[seed % 3]
    stages_per_rank = {"one": 1, "looped": rng.choice((2, 2, 3)), "v": 2}[placement]
    num_microbatches = rng.randint(num_ranks, 4 * num_ranks)
    if placement == "looped" and rng.random() < 0.6:
        num_microbatches -= num_microbatches % num_ranks  # what the interleaved families want
    costs = _costs(rng, num_ranks * stages_per_rank)
    shape = (num_ranks, num_microbatches, placement, stages_per_rank, costs)
    return Instance(seed, *shape, _limit(rng, Instance(seed, *shape, None)))


def _costs(rng: random.Random, num_stages: int) -> Costs:
    """Stages within 40 % of each other, or equal ones; then the last one up to 2.5 times as heavy, or not."""
    spread = rng.choice((0.0, 0.2, 0.4))
    scale = [rng.uniform(1 - spread, 1 + spread) for _ in range(num_stages)]
    scale[-1] *= rng.choice((1.0, rng.uniform(1.2, 2.5)))
    f = [round(10 * each, 2) for each in scale]
    b = [round(each * rng.uniform(0.9, 1.4), 2) for each in f]
    w = [round(each * rng.uniform(0.5, 1.1), 2) for each in f]
    comm = rng.choice((0.0, 1.0, 3.0))
    saved = [round(rng.uniform(0.6, 1.4) * GIB) for _ in range(num_stages)]
    deferred = [round(each * rng.uniform(0.2, 1.1)) for each in saved]
    late = [round(rng.uniform(0, comm), 2) for _ in range(num_stages)]
    return Costs(f=f, b=b, w=w, comm=late, saved=saved, deferred=deferred)


def _limit(rng: random.Random, unlimited: Instance) -> list[float] | None:
    """What a family needs on each rank, times 1 to 1.3: that family fits, others may not."""
    fitting = list(unlimited.rivals())
    frugal = [name for name in fitting if name not in ("gpipe", "looped_bfs")]
    if rng.random() < 0.1:
        return None
    needed = simulate(unlimited.planned(rng.choice(frugal or fitting)), unlimited.costs).peak_memory
    return [float(round(peak * rng.uniform(1, 1.3))) for peak in needed]


def judge(instance: Instance, time_limit: float, seed: int = 0) -> Outcome:
    """zb_auto against the best family that fits. Raises PlanError for a plan that is invalid or too large."""
    rivals = instance.rivals()
    family = min(rivals, key=rivals.__getitem__)
    found = instance.planned("zb_auto", time_limit=time_limit, seed=seed)
    proof = certificate(found, instance.costs, "makespan", instance.memory_limit)
    return Outcome(instance, family, rivals[family], proof.value, proof.bound, proof.proved_optimal)


def print_random(options: argparse.Namespace) -> int:
    """Print the table and its count of verdicts; exit status 1 if a family was not beaten."""
    print("seed  p   m placement  best family             ms   zb_auto   faster      bound     gap  verdict")
    verdicts: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.instances):
        outcome = judge(draw(seed), options.time_limit, options.seed)
        verdicts[outcome.verdict] += 1
        print(_line(outcome), flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    return 1 if verdicts["EQUAL"] or verdicts["WORSE"] else 0


def _line(outcome: Outcome) -> str:
    each = outcome.instance
    faster = round(1 - outcome.value / outcome.best_family, 4) + 0.0  # no -0.00%
    placement = each.placement if each.placement != "looped" else f"looped({each.stages_per_rank})"
    return (
        f"{each.seed:4} {each.num_ranks:2} {each.num_microbatches:3} {placement:9}  {outcome.family:16} "
        f"{outcome.best_family:9.2f} {outcome.value:9.2f} {faster:8.2%} "
        f"{outcome.bound:10.2f} {outcome.gap:7.2%}  {outcome.verdict}"
    )


# ---------------------------------------------------------------- scale


def print_scale(options: argparse.Namespace) -> int:
    """Print seconds per schedule and step, and the process's largest memory."""
    for name in ("zb_h1", "zb_v"):
        clock = [perf_counter()]
        timetable = plan(name, options.ranks, options.microbatches)
        clock.append(perf_counter())
        makespan = simulate(timetable).makespan
        clock.append(perf_counter())
        num_instructions = sum(len(program.instructions) for program in lower(timetable))
        clock.append(perf_counter())
        planned, simulated, lowered = (end - start for start, end in pairwise(clock))
        print(
            f"{name}: plan {planned:.1f} s, simulate {simulated:.1f} s (makespan {makespan:g}), "
            f"lower {lowered:.1f} s ({num_instructions:,} instructions)"
        )
    print(f"largest memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one evaluation; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--time-limit", type=float, default=10.0, metavar="S", help="of each search (10 s)")
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    forms = parser.add_subparsers(required=True)
    targets = forms.add_parser("targets")
    targets.add_argument("table", choices=("one", "v"))
    targets.add_argument("--only", default="", metavar="TEXT", help="cells named so, such as m=64")
    targets.set_defaults(run=print_targets)
    rivals = forms.add_parser("random")
    rivals.add_argument("--instances", type=int, default=100, metavar="N", help="how many (default 100)")
    rivals.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first (default 0)")
    rivals.set_defaults(run=print_random)
    scale = forms.add_parser("scale")
    scale.add_argument("ranks", nargs="?", type=int, default=64, help="default 64; 512 is promised")
    scale.add_argument("microbatches", nargs="?", type=int, default=1024, help="1024; 4096 is promised")
    scale.set_defaults(run=print_scale)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())

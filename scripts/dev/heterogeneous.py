#!/usr/bin/env python
"""zb_auto against every family on random pipelines: uneven stages, a heavy last one, memory per rank.

Each instance: 2 to 8 ranks, p to 4p microbatches, one stage per rank, looped or V; F, B, W, message
times and held bytes drawn per stage; whole backwards that are sometimes shorter; and per rank what
some family needs, times 1 to 1.3. The table says whether `zb_auto` beats the best family that fits,
how far it is from the lower bound, and whether it is proved optimal: where it equals a family and the
bound leaves that open, OR-tools is asked, if it is there and the case is small. Needs numpy only.
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from zbpp.planning import SCHEDULES, plan
from zbpp.planning.bounds import certificate
from zbpp.planning.objective import objective_value
from zbpp.planning.problem import Problem
from zbpp.schedule import Costs, PlanError, Timetable, simulate
from zbpp.schedule.families import FAMILIES

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
    shorter = rng.choice((None, None, 0.85, 0.95))
    whole = shorter and [round((x + y) * rng.uniform(shorter, 1), 2) for x, y in zip(b, w, strict=True)]
    comm = rng.choice((0.0, 1.0, 3.0))
    saved = [round(rng.uniform(0.6, 1.4) * GIB) for _ in range(num_stages)]
    deferred = [round(each * rng.uniform(0.2, 1.1)) for each in saved]
    late = [round(rng.uniform(0, comm), 2) for _ in range(num_stages)]
    return Costs(f=f, b=b, w=w, bw=whole, comm=late, saved=saved, deferred=deferred)


def _limit(rng: random.Random, unlimited: Instance) -> list[float] | None:
    """What a family needs on each rank, times 1 to 1.3: that family fits, others may not."""
    fitting = list(unlimited.rivals())
    frugal = [name for name in fitting if name not in ("gpipe", "looped_bfs")]
    if rng.random() < 0.1:
        return None
    needed = simulate(unlimited.planned(rng.choice(frugal or fitting)), unlimited.costs).peak_memory
    return [float(round(peak * rng.uniform(1, 1.3))) for peak in needed]


def problem_of(instance: Instance) -> Problem:
    return Problem.placed(
        instance.num_ranks,
        instance.num_microbatches,
        costs=instance.costs,
        memory_limit=instance.memory_limit,
        placement=instance.placement,
        stages_per_rank=instance.stages_per_rank,
    )


def with_little_memory(instance: Instance) -> Instance:
    """The instance with 1.5 times what one microbatch needs, on each rank."""
    least = problem_of(replace(instance, memory_limit=None)).least_memory
    return replace(instance, memory_limit=[1.5 * each for each in least])


def judge(instance: Instance, time_limit: float, seed: int = 0) -> Outcome:
    """zb_auto against the best family that fits. Raises PlanError for a plan that is invalid or too large."""
    rivals = instance.rivals()
    family = min(rivals, key=rivals.__getitem__)
    found = instance.planned("zb_auto", time_limit=time_limit, seed=seed)
    proof = certificate(found, instance.costs, "makespan", instance.memory_limit)
    return Outcome(instance, family, rivals[family], proof.value, proof.bound, proof.proved_optimal)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and its count of verdicts; exit status 1 if a family was not beaten."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--instances", type=int, default=100, metavar="N", help="how many (default 100)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first (default 0)")
    parser.add_argument("--time-limit", type=float, default=5.0, metavar="S", help="per plan (default 5 s)")
    options = parser.parse_args(arguments)
    print("seed  p   m placement  best family             ms   zb_auto   faster      bound     gap  verdict")
    verdicts: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.instances):
        outcome = judge(draw(seed), options.time_limit)
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


if __name__ == "__main__":
    sys.exit(main())

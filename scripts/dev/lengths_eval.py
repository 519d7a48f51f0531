#!/usr/bin/env python
"""What the order of unequal microbatches brings: the step's time over its ideal, work / ranks.

    python scripts/dev/lengths_eval.py               the table, as scripts/results/lengths.txt has it

Lengths are drawn from a lognormal distribution with variation cv (numpy's default_rng(draw), draws 0, 1, 2),
and divided by their mean. Each figure is the mean of the draws: "1f1b", "zb_h1" and "zb_v" keep the random
order in which the lengths are drawn. At the mean length F, B and W of a rank take 10, 12.5 and 7.5 ms:
attention is a quarter of F, takes twice as much in B and has no W, and grows with the square.

hill, searched    zb_v's step in these orders
bound             what no order undercuts in zb_v's timetable
path              from the longest microbatch's first F to its last B
held, (random)    what a rank holds at most, in p mean microbatches: in the searched order, in the random one
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zbpp.planning import order_bound, order_microbatches, own_path, plan
from zbpp.planning.order.order_microbatches import hill
from zbpp.schedule import Costs, Timetable, simulate

ROWS = ((4, 16, 0.3), (4, 16, 0.6), (8, 32, 0.3), (8, 32, 0.6), (8, 32, 1.0))
SHARE = 0.25  # of attention in F at the mean length
COLUMNS = ("1f1b", "zb_h1", "zb_v", "hill", "searched", "bound", "path", "held", "(random)")


def lengths_of(num_microbatches: int, cv: float, draw: int) -> npt.NDArray[np.float64]:
    drawn = np.random.default_rng(draw).lognormal(0, np.sqrt(np.log(1 + cv * cv)), num_microbatches)
    return drawn / drawn.mean()


def costs_of(timetable: Timetable, lengths: npt.NDArray[np.float64], ms: float = 10) -> Costs:
    """ms: F of a microbatch of length 1 on a rank."""
    each = ms / (timetable.num_stages // timetable.num_ranks)  # per stage
    linear, squared = (1 - SHARE) * each, SHARE * each
    held = Costs(f=linear, b=linear, w=linear, saved=each / 10, deferred=each / 20)
    return Costs.of_lengths(lengths, held, Costs(f=squared, b=2 * squared, w=0))


def measured(p: int, m: int, cv: float, draw: int, time_limit: float) -> list[float]:
    """One draw's figures, in the order of COLUMNS."""
    lengths = lengths_of(m, cv, draw)
    figures = []
    for name in ("1f1b", "zb_h1", "zb_v"):
        timetable = plan(name, p, m)
        costs = costs_of(timetable, lengths)
        ideal = m * sum(sum(each) for each in _work(costs, timetable.num_stages)) / p
        figures.append(simulate(timetable, costs).makespan / ideal)
    found = order_microbatches(timetable, costs, time_limit)
    timelines = [simulate(timetable, costs.reordered(order)) for order in (hill(lengths), found)]
    figures += [each.makespan / ideal for each in timelines]
    figures += [order_bound(timetable, costs) / ideal, own_path(timetable.rank_of, costs) / ideal]
    return [*figures, *(max(each.peak_memory) / p for each in (timelines[1], simulate(timetable, costs)))]


def _work(costs: Costs, num_stages: int) -> list[list[float]]:
    duration = costs.uniform.per_stage(num_stages).duration
    return [each for op, each in duration.items() if op.name != "BW"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=0.05, help="seconds for each search")
    options = parser.parse_args()
    print(f"zbpp's own plans; mean of draws 0..{options.draws - 1}; {options.time_limit:g} s for each search")
    print(f"{'p':>2} {'m':>3} {'cv':>4} " + " ".join(f"{name:>8}" for name in COLUMNS))
    for p, m, cv in ROWS:
        rows = [measured(p, m, cv, draw, options.time_limit) for draw in range(options.draws)]
        print(
            f"{p:2d} {m:3d} {cv:4g} " + " ".join(f"{each:8.3f}" for each in np.mean(rows, axis=0)), flush=True
        )


if __name__ == "__main__":
    main()

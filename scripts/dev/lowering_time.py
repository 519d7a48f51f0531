#!/usr/bin/env python
"""How long a rank takes to make a program of a timetable that it has not run before: lower, then resolve.

    python scripts/dev/lowering_time.py                8 ranks, 32 microbatches, median of 40 timetables each

A loop that gives each batch a timetable of its own does this once per batch, in `Pipeline.use_timetable`;
where only the order of the microbatches changes, nothing is lowered. lower: simulate, messages, releases
(zbpp/schedule/lower.py). resolve: posts, functions, slots (zbpp/runtime/resolve.py). The stages are linear
layers, and the links are stubs, since nothing runs. `both` should be at most 5 ms on a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zbpp.planning import plan
from zbpp.runtime.executor import Executor
from zbpp.runtime.lowering import Lowering
from zbpp.runtime.rank import METHODS
from zbpp.runtime.stage import StageWorker
from zbpp.schedule import Timetable, lower

NAMES = ("1f1b", "zb_h1", "zb_v")


def times_of(timetable: Timetable, rank: int, repeats: int) -> list[tuple[float, float]]:
    """(lower, resolve) in ms of each repeat. The rank keeps what it makes, as in a run."""
    last = timetable.num_stages - 1
    workers = {
        each: StageWorker(each, nn.Linear(2, 2), is_last=each == last) for each in timetable.stages_of(rank)
    }
    programs = lower(timetable)
    links = {pair: object() for pair in programs.links}
    executor = Executor(
        programs[rank], workers, METHODS["step"], timetable.num_stages, links, torch.device("cpu")
    )
    found = []
    for number in range(repeats):
        start = time.perf_counter()
        program = Lowering(timetable, str(number), rank).program("step")
        lowered = time.perf_counter()
        executor.use(str(number), program)
        executor.begin([])
        found.append((1e3 * (lowered - start), 1e3 * (time.perf_counter() - lowered)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=40, help="timetables of each schedule (default: 40)")
    args = parser.parse_args()
    print(f"{args.ranks} ranks, {args.microbatches} microbatches; medians of {args.repeats}, in ms")
    print(f"{'':8}{'lower':>8}{'resolve':>9}{'both':>7}")
    for name in NAMES:
        timetable = plan(name, args.ranks, args.microbatches)
        times = times_of(timetable, args.ranks // 2 - 1, args.repeats)
        lowered, resolved = (statistics.median(column) for column in zip(*times, strict=True))
        both = statistics.median(map(sum, times))
        print(f"{name:8}{lowered:8.2f}{resolved:9.2f}{both:7.2f}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""How long planning takes at scale: plan, simulate (which validates), lower every rank's program."""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zbpp.planning import plan
from zbpp.schedule import PlanError, lower, simulate


def main(arguments: Sequence[str] | None = None) -> None:
    """Print seconds per schedule and step, and the process's largest memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", nargs="?", type=int, default=64, help="default 64; 512 is promised")
    parser.add_argument(
        "microbatches", nargs="?", type=int, default=1024, help="default 1024; 4096 is promised"
    )
    options = parser.parse_args(arguments)
    try:
        _measure(options.ranks, options.microbatches)
    except PlanError as error:
        parser.error(str(error))


def _measure(num_ranks: int, num_microbatches: int) -> None:
    for name in ("zb_h1", "zb_v"):
        clock = [perf_counter()]
        timetable = plan(name, num_ranks, num_microbatches)
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


if __name__ == "__main__":
    main()

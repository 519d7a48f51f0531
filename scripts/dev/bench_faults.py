#!/usr/bin/env python
"""Put faults into real training jobs; see when each is noticed, what is lost, and if the curve is the same.

    python scripts/dev/bench_faults.py                                    # all kinds of faults, 5 seeds each
    python scripts/dev/bench_faults.py --faults SIGKILL "exception in B" --seeds 1

Each job is started again with resume=auto, or by torchrun; then its losses and norms must be equal, to the
last bit, to those of a run without a fault. A fault is noticed when no process of the job is left, or, where
the job goes on, when it has said so. The seed chooses step, rank, microbatch and moment.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults.case import Row, Setting, reference, run_case
from faults.job import warm_python
from faults.kinds import KINDS
from faults.report import summary_of, write


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--faults", nargs="*", default=[""], metavar="NAME", help="those whose name has this in it"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=5.0, help="s: parallel.timeout")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="write faults_cpu.txt and .json there")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the jobs' folders there")
    options = parser.parse_args()
    names = [name for name in KINDS if any(each in name for each in options.faults)]
    if not names or options.ranks < 2 or options.seeds < 1:
        parser.error(f"choose of these faults, at least 2 ranks and 1 seed: {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        rows = run(names, options, options.keep or Path(folder))
    print("\n" + summary_of(rows, options))
    if options.results:
        write(options.results, rows, options)
    if any(row.problems for row in rows):
        sys.exit("not all as it must be")


def run(names: list[str], options: argparse.Namespace, folder: Path) -> list[Row]:
    """Run all cases, some at a time; a line each."""
    warm = warm_python()
    try:
        setting = Setting(warm.bin, Path(sys.executable).parent, options.ranks, options.timeout)
        whole = reference(setting, folder / "whole")
        cases = [(name, seed) for seed in range(options.seeds) for name in names]

        def case(number: int) -> Row:
            name, seed = cases[number]
            row = run_case(name, seed, setting, whole, folder / f"{number}")
            seconds = "-" if row.detected is None else f"{row.detected:.1f} s"
            said = "; ".join(row.problems) or f"{seconds}, {row.recovered}, {row.lost} steps done again"
            print(f"{number + 1:3}/{len(cases)}  {name}, seed {seed} ({row.where}): {said}", flush=True)
            return row

        with ThreadPoolExecutor(options.jobs) as pool:
            return list(pool.map(case, range(len(cases))))
    finally:
        warm.close()


if __name__ == "__main__":
    main()

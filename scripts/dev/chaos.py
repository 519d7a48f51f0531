#!/usr/bin/env python
"""Train for some minutes under random faults; then compare the curve with that of a run without any.

    python scripts/dev/chaos.py --minutes 10 --seed 0
    python scripts/dev/chaos.py --steps 60 --num-faults 3

A fault ends the job, or corrupts its files; the same command is started again and goes on (resume=auto). At
the end the losses and norms of all steps must be equal, to the last bit, to those of the run without faults.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from faults.case import STEPS, Setting, reference
from faults.chaos import HEAD, Event, chaos, drawn, problems_of
from faults.job import lines_of, warm_python

from zbpp.render.table import aligned

_OF_TRAINING = 0.6  # of the time; the rest is for starts and for noticing
_PER_MINUTE = 1.4  # faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=5.0, help="s: parallel.timeout")
    parser.add_argument("--steps", type=int, help="so many, however long they take")
    parser.add_argument("--num-faults", type=int, help="so many")
    parser.add_argument("--result", type=Path, metavar="FILE", help="write what is printed there, too")
    options = parser.parse_args()
    warm = warm_python()
    try:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            setting = Setting(warm.bin, Path(sys.executable).parent, options.ranks, options.timeout)
            text, problems = run(options, setting, Path(folder))
    finally:
        warm.close()
    if options.result:
        options.result.write_text(text + "\n")
    if problems:
        sys.exit("not all as it must be")


def run(options: argparse.Namespace, setting: Setting, folder: Path) -> tuple[str, list[str]]:
    """The run without faults, then the one with them; (what is printed, what must not be)."""
    setting = with_steps(options, setting, folder)
    whole = reference(setting, folder / "whole")
    num_faults = options.num_faults or max(2, round(_PER_MINUTE * options.minutes))
    faults = drawn(num_faults, setting.steps, options.seed)
    begin = time.monotonic()
    events = chaos(setting, faults, options.seed, folder / "chaos", show)
    problems = problems_of(events, setting, folder / "chaos" / "run", whole)
    text = "\n".join(
        [
            f"{len(events)} faults (seed {options.seed}) in {(time.monotonic() - begin) / 60:.1f} minutes: "
            f"{setting.steps} steps on {setting.num_ranks} ranks, parallel.timeout={setting.timeout:g}; "
            f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}",
            "",
            *aligned([HEAD, *(event.cells() for event in events)]),
            "",
            *(problems or [f"each of {len(whole)} steps once, losses and norms equal to the last bit"]),
        ]
    )
    print("\n" + text)
    return text, problems


def with_steps(options: argparse.Namespace, setting: Setting, folder: Path) -> Setting:
    """The setting with as many steps as the time allows."""
    if options.steps:
        return replace(setting, steps=options.steps)
    setting = replace(setting, seconds=0.02)
    reference(setting, folder / "speed")
    seconds = median(line["step_seconds"] for line in lines_of(folder / "speed" / "run"))
    return replace(setting, steps=max(STEPS, int(_OF_TRAINING * 60 * options.minutes / seconds)))


def show(event: Event) -> None:
    """A line as soon as the fault has been noticed."""
    print("  ".join(event.cells()), flush=True)


if __name__ == "__main__":
    main()

"""Entry of each process: torchrun ... -m zbpp.benchmark.cluster --out DIR --parts links,schedules

scripts/cluster_check.sh starts the jobs, see launch.py: use the script. `--report` needs no torchrun: it
prints the table of what the parts have left in DIR, and ends with status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from zbpp.benchmark.cluster.settings import BEGUN, FIRST_NODE, PARTS, Settings

_COUNTS = {
    "message_mib": "MiB of a large message",
    "hidden": "hidden size of the timed model",
    "layers": "its layers per rank",
    "sequence": "tokens of a row",
    "rows": "rows of a microbatch",
    "microbatches": "microbatches of a timed step, for each rank",
    "steps": "timed steps of each schedule",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m zbpp.benchmark.cluster", description=__doc__, formatter_class=layout
    )
    parser.add_argument("--report", action="store_true", help="print the table of what is in the folder")
    given = vars(make_parser(parser).parse_args(arguments))
    parts, is_report, is_small = given.pop("parts"), given.pop("report"), given.pop("small")
    settings = Settings(out=given.pop("out"))
    settings = settings.small() if is_small else settings
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    if is_report:
        from zbpp.benchmark.cluster.report import report

        text, is_fine, problem = report(settings.out)
        print(text)
        print(problem, file=sys.stderr, end="\n" * bool(problem))
        return int(not is_fine or bool(problem))
    _run(parts, settings)
    return 0


def _run(parts: Sequence[str], settings: Settings) -> None:
    from zbpp.benchmark.cluster import hang
    from zbpp.benchmark.cluster.parts import run_part
    from zbpp.end_with_launcher import end_with_launcher
    from zbpp.job.world import world

    end_with_launcher()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        settings.out.mkdir(parents=True, exist_ok=True)
        (settings.out / BEGUN).touch()
    with world(device=settings.device, timeout=settings.timeout) as here:
        if here.rank == 0:  # this node prints the table
            (settings.out / FIRST_NODE).touch()
        for part in parts:
            if part == "hang":
                hang.run(settings, here)
            else:
                run_part(part, settings, here)


def make_parser(parser: argparse.ArgumentParser, out: str | None = None) -> argparse.ArgumentParser:
    """The parser with the options of a check. out: the default of --out, which else is required."""
    default = None if out is None else Path(out)
    parser.add_argument(
        "--out", type=Path, required=out is None, default=default, help="folder of the results"
    )
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="small sizes, for a trial on CPUs")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--timeout", type=_positive(float), help="seconds that a rank waits for another")
    parser.add_argument("--hang-timeout", type=_positive(float), help="the same in the hang test")
    parser.add_argument("--timed", type=_names, help="schedules that are timed: 1f1b,zb_h1,...")
    defaults = {field.name: field.default for field in fields(Settings)}
    for name, text in _COUNTS.items():
        shown = f"{text} (default {defaults[name]})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=_positive(int), help=shown)
    return parser


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    wrong = [name for name in names if name not in PARTS]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no part: write some of {','.join(PARTS)}")
    return names


def _names(text: str) -> tuple[str, ...]:
    from zbpp.planning import SCHEDULES

    names = tuple(text.split(","))
    wrong = [name for name in names if name not in SCHEDULES]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no schedule: write some of {','.join(SCHEDULES)}")
    return names


def _positive(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = kind(0)
        if not 0 < number < 1e9:
            raise argparse.ArgumentTypeError(f"{text!r}: write a number above 0")
        return number

    return parse


if __name__ == "__main__":
    sys.exit(main())

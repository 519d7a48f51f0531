#!/usr/bin/env python
"""The split backward beside plain backward and torch's own split: zbpp/benchmark/split says what is measured.

    python scripts/bench_split.py                              # everything but `compiled`, on the CPU
    python scripts/bench_split.py memory products --json split.json
    python scripts/bench_split.py --device cuda --dtype bfloat16 --hidden 2048 --batch 8 --time 2048

(The last has not been run on a GPU yet.)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from zbpp.benchmark import split
from zbpp.benchmark.split.report import as_json, machine, table
from zbpp.benchmark.split.sections import SECTIONS, measure
from zbpp.benchmark.split.stages import Settings

COUNTS = {
    "hidden": "hidden size of the stages for memory and compute",
    "batch": "rows of x there",
    "time": "tokens of a row there",
    "blocks": "blocks of a stage there",
    "tiny": "hidden size of the stages for host time",
    "rounds": "rounds of host time",
    "compute_rounds": "rounds of compute time",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a mark was missed."""
    options = vars(parse(arguments))
    sections, threads, path = options.pop("sections"), options.pop("threads"), options.pop("json")
    settings = Settings(**options | {"depths": tuple(options["depths"])})
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("error: --device cuda, but this torch sees no GPU: write --device cpu")
    torch.set_num_threads(threads)
    with Console(stderr=True).status("") as status:
        about = machine(settings.device)
        usual = [name for name in SECTIONS if name != "compiled"]
        lines, remarks = measure(sections or usual, settings, lambda text: status.update(text))
    print(table(lines, about, settings, remarks))
    if path is not None:
        path.write_text(json.dumps(as_json(lines, about, settings, remarks), indent=2) + "\n")
    return int(any(line.met is False for line in lines))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    default = Settings()
    description = f"{__doc__}\n{split.__doc__}"
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(SECTIONS)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"{known}; by default all but the last"
    )
    parser.add_argument("--device", default=default.device, help="cpu or cuda")
    parser.add_argument("--dtype", default=default.dtype, choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    for name, text in COUNTS.items():
        value = getattr(default, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, help=f"{text}; default {value}"
        )
    parser.add_argument("--depths", type=int, nargs="+", default=default.depths, help="blocks for host time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON")
    options = parser.parse_args(arguments)
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"section {name!r} does not exist: write some of {known}")
    for name in ("threads", *COUNTS):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: write 1 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""What the switches of memory and of the optimizer's step save and cost, in one run: a table and JSON.

python scripts/bench_memory.py                       # every module of zbpp/benchmark/memory, on the CPU
python scripts/bench_memory.py predicted release
python scripts/bench_memory.py --out scripts/results/bench_memory_cpu    # writes .txt and .json
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import platform
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from zbpp.benchmark import memory

Rows = list[tuple[str, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a section failed."""
    options = parse(arguments)
    torch.set_num_threads(1)
    found: dict[str, Rows] = {}
    failed: dict[str, str] = {}
    for name in options.sections or sections():
        begin = time.perf_counter()
        try:
            found[name] = [
                (what, figure) for what, figure in import_module(f"{memory.__name__}.{name}").rows()
            ]
        except Exception as error:  # the other sections are still worth their time
            failed[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    text = table(found, failed)
    print(text)
    if options.out is not None:
        options.out.with_suffix(".txt").write_text(text + "\n")
        document = {"about": about(), "sections": found, "failed": failed}
        options.out.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
    return int(bool(failed))


def sections() -> list[str]:
    """The modules of zbpp/benchmark/memory that have rows()."""
    names = sorted(each.name for each in pkgutil.iter_modules(memory.__path__))
    return [name for name in names if hasattr(import_module(f"{memory.__name__}.{name}"), "rows")]


def table(found: dict[str, Rows], failed: dict[str, str]) -> str:
    """A block of lines per section."""
    width = max((len(what) for rows in found.values() for what, _ in rows), default=0)
    blocks = ["; ".join(f"{key} {value}" for key, value in about().items())]
    for name, rows in found.items():
        blocks.append("\n".join([name, *(f"  {what:{width}}  {figure}" for what, figure in rows)]))
    blocks += [f"{name} FAILED\n  {why}" for name, why in failed.items()]
    return "\n\n".join(blocks)


def about() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "device": f"{os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = sections()
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of {', '.join(known)}")
    parser.add_argument("--out", type=Path, metavar="PATH", help="write PATH.txt and PATH.json")
    options = parser.parse_args(arguments)
    for name in options.sections:
        if name not in known:
            parser.error(f"section {name!r} does not exist: write some of {', '.join(known)}")
    return options


if __name__ == "__main__":
    sys.exit(main())

"""The command line. The process of each rank runs the parts, as processes that join each other."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from gpu_check.parts import Part, new_file, run_part, write_page

import cluster_check
from cluster_check.rows import Check, Timeouts, machines
from zbpp.job.joining import job_store
from zbpp.job.world import world

# A part is the function `run` of the module of its name. The most important ones come first.
PARTS = (
    Part("waits", 120),
    Part("first", 300),
    Part("schedules", 240),
    Part("meshes", 240),
    Part("figures", 180),
    Part("hang", 120),
)
SCRIPT = Path(__file__).resolve().parent.parent / "cluster_check.py"
_LEAST = 10.0  # s: with less left no part begins
_SPARE = 20.0  # s in which a rank's answer comes after the part's limit


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: see the package's docstring."""
    options = parse(arguments)
    if options.part:
        return run(options)
    parts = [part for part in PARTS if part.name in (options.parts or [each.name for each in PARTS])]
    return _Ranks(options, arguments).run(parts)


class _Ranks:
    """This rank's process: it runs a part when rank 0 says so, and tells rank 0 how the part ended."""

    def __init__(self, options: argparse.Namespace, arguments: Sequence[str] | None) -> None:
        self._options = options
        self._store, self._rank, self._size = job_store(60.0)
        given = list(sys.argv[1:] if arguments is None else arguments)
        self._given = [each for each in given if each not in options.parts]
        self._out = options.out if self._rank == 0 else options.out / f"rank-{self._rank}"
        self._out.mkdir(parents=True, exist_ok=True)
        self._start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # The store stands in torchrun or in rank 0's process; the parts only ask it.
        self._environment = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": self._start,
        }

    def run(self, parts: Sequence[Part]) -> int:
        end, num_failed = time.monotonic() + self._options.seconds, 0
        for number, part in enumerate(parts):
            limit = self._agreed(f"limit/{number}", min(part.limit, end - time.monotonic()))
            path = new_file(self._out, part.name)
            if limit < _LEAST:
                path.write_text(f"## {part.name}\n\nLEFT OUT: {limit:.0f} s are left\n")
                num_failed += 1
            else:
                num_failed += self._part(number, part._replace(limit=limit), path)
            if self._rank == 0:
                write_page(self._out, f"zbpp on {self._size} ranks, {time.strftime('%Y-%m-%d %H:%M')}")
                print(path.read_text(), flush=True)
        self._agreed("end", 0.0)
        if self._rank == 0:
            print(f"{num_failed or 'no'} part(s) failed; the page: {self._out / 'page.md'}", flush=True)
        return int(num_failed > 0)

    def _part(self, number: int, part: Part, path: Path) -> bool:
        """Run one part here; whether it failed on a rank. Rank 0 adds what other ranks say."""
        command = [sys.executable, str(SCRIPT), *self._given, "--part", part.name, "--limit", f"{part.limit}"]
        is_fine = run_part(part, command, path, self._environment)
        self._set(f"ended/{number}/{self._rank}", "" if is_fine else path.read_text()[-4000:])
        failed = [] if is_fine else [0]
        for other in range(1, self._size) if self._rank == 0 else ():
            said = self._get(f"ended/{number}/{other}", _SPARE) or ""
            if said.strip():
                failed.append(other)
                with path.open("a") as file:
                    print(f"\nrank {other}:\n{said}", file=file)
        return bool(failed)

    def _agreed(self, name: str, value: float) -> float:
        """Rank 0's number, on every rank."""
        if self._rank == 0:
            self._set(name, str(value))
            return value
        told = self._get(name, self._options.seconds + _SPARE)
        return float(told) if told else 0.0

    def _set(self, name: str, value: str) -> None:
        self._store.set(f"check/{self._start}/{name}", value or " ")

    def _get(self, name: str, timeout: float) -> str | None:
        """A value of the store; None if it does not come within so many seconds."""
        key, end = f"check/{self._start}/{name}", time.monotonic() + timeout
        while not self._store.check([key]):
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
        value: Any = self._store.get(key)
        return str(value.decode())


def run(options: argparse.Namespace) -> int:
    """One part on one rank."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, options.limit - 4.0))
    torch.set_num_threads(1)
    timeouts = Timeouts(60.0, 4.0) if options.small else Timeouts()
    if options.timeout is not None:
        timeouts = replace(timeouts, waiting=options.timeout)
    with world(device=options.device, timeout=timeouts.waiting) as here:
        check = Check(here, timeouts, options.small, options.out)
        for line in machines(here):
            check.write(line)
        importlib.import_module(f"cluster_check.{options.part}").run(check)
    return int(check.num_failed > 0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program where they are wrong, with what to write instead."""
    parser = argparse.ArgumentParser(
        description=cluster_check.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)}; by default all")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: a GPU if any"
    )
    parser.add_argument("--small", action="store_true", help="short timeouts, to try the check itself")
    parser.add_argument(
        "--timeout", type=float, help=f"s that a rank waits for another; default {Timeouts.waiting:g}"
    )
    parser.add_argument("--seconds", type=float, default=1200.0, help="for all parts; default %(default)g")
    parser.add_argument("--out", type=Path, default=Path("cluster_check_out"), help="folder of the results")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)  # of a part's process
    parser.add_argument("--limit", type=float, default=600.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in options.parts:
        if name not in names:
            parser.error(f"part {name!r} does not exist: write some of {', '.join(names)}")
    if "RANK" not in os.environ:
        parser.error("no torchrun: write torchrun --nproc-per-node 2 scripts/cluster_check.py ...")
    return options

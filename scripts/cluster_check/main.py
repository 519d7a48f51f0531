"""The command line. The process of each rank runs the parts, as processes that join each other."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from gpu_check.parts import Part, end_with_parent, exit_on_sigterm

import cluster_check
from cluster_check.driver import Driver
from cluster_check.rows import Check, Timeouts, machines
from zbpp.job.agreement import gather
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: see the package's docstring."""
    options = parse(arguments)
    if options.part:
        return run(options)
    exit_on_sigterm()
    store, rank, size = job_store(60.0)
    given = [each for each in (sys.argv[1:] if arguments is None else arguments) if each not in options.parts]
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # The store stands in torchrun or in rank 0's process; the parts only ask it.
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": start}
    driver = Driver(
        store,
        f"check/{start}",
        rank,
        size,
        lambda part: [sys.executable, str(SCRIPT), *given, "--part", part.name, "--limit", f"{part.limit}"],
        options.out,
    )
    names = options.parts or [each.name for each in PARTS]
    slack = 4 if options.small else 1  # a CPU that others use, too
    parts = [
        part._replace(environment=environment, limit=slack * part.limit)
        for part in PARTS
        if part.name in names
    ]
    return driver.run(parts, options.seconds)


def run(options: argparse.Namespace) -> int:
    """One part on one rank."""
    end_with_parent()
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
        gather("")  # NCCL's communicators are ended by all ranks at about the same time
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

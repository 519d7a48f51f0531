#!/usr/bin/env python
"""Kill runs while they save, again and again; then see whether anything was lost.

    python scripts/dev/kill_saves.py                     # 20 kills of 4 processes
    python scripts/dev/kill_saves.py --kills 3 --ranks 2
    python scripts/dev/kill_saves.py --measure           # how long training stands still for a checkpoint

A run that nobody kills is the reference. The same run then saves every few steps. At a random moment after a
save has begun, the first to third of its start, all of its processes get SIGKILL. It is started again, with
the same arguments, and goes on from its newest whole checkpoint. At the end its metrics are compared with the
reference's: every step once, each loss equal to the last bit. The moments are drawn from a seed, but what
they hit depends on the machine: the table says it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from zbpp.checkpoints.folders import check_sizes, checkpoints_in

_CONTEXT = multiprocessing.get_context("forkserver")
_MODEL = ("model=mlp", "data=regression", "schedule=zb_h1", "num_microbatches=4", "microbatch_size=4")
_RUN = (
    "evaluate_every=0",
    "save_weights=false",
    "print_every=1000",
    "parallel.device=cpu",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--hidden", type=int, default=512, help="size of the 8 layers")
    parser.add_argument(
        "--latest", type=float, default=1.0, help="s after a save's beginning, the latest kill"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", action="store_true", help="kill nothing, measure")
    options = parser.parse_args()
    # A process that starts from a server with torch in it starts in tenths of a second.
    _CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "zbpp.run.app"])
    with tempfile.TemporaryDirectory() as folder:
        (measure if options.measure else kill)(Path(folder), options)


def kill(folder: Path, options: argparse.Namespace) -> None:
    """Compare a run that is killed many times with one that is not. Exits with 1 if they differ."""
    steps = options.every * (2 * options.kills + 4)  # enough to be killed so often
    arguments = [*_MODEL, *_RUN, f"steps={steps}", *_sizes(options.hidden)]
    Job(options.ranks, [*arguments, f"run_dir={folder / 'whole'}", "checkpoint.every=0"], folder).finish()
    rng, run_dir, kills = random.Random(options.seed), folder / "killed", 0
    saving = [f"run_dir={run_dir}", f"checkpoint.every={options.every}", "checkpoint.keep=3"]
    print("kill   s after the save began   in the folder                       goes on after step")
    while True:
        job = Job(options.ranks, [*arguments, *saving], folder)
        number, delay = rng.randrange(3), rng.uniform(0, options.latest) * rng.random()
        if kills == options.kills or not job.kill_in_a_save(run_dir / "checkpoints", number, delay):
            job.finish()
            break
        kills += 1
        found = ", ".join(sorted(path.name for path in (run_dir / "checkpoints").glob("step-*")))
        print(f"{kills:4}   {delay:22.3f}   {found:33}   {_newest(run_dir / 'checkpoints')}", flush=True)
        if (run_dir / "summary.json").exists():  # killed behind its end: nothing is left to do
            break
    _compare(folder / "whole", run_dir, kills)


def _compare(whole: Path, killed: Path, kills: int) -> None:
    rows = [[json.loads(line) for line in (each / "metrics.jsonl").open()] for each in (whole, killed)]
    losses = [[(row["step"], row["loss"], row["grad_norm"]) for row in each] for each in rows]
    if losses[0] != losses[1]:
        sys.exit(f"after {kills} kills the metrics differ: {len(losses[0])} and {len(losses[1])} lines")
    print(f"{kills} kills; {len(losses[0])} steps, each once, losses and norms equal to the last bit")


def _newest(folder: Path) -> str:
    """The step of the newest checkpoint whose files are complete."""
    for path in checkpoints_in(folder):
        with suppress(ValueError):
            check_sizes(path)
            return path.name.removeprefix("step-")
    return "0"


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Print how long training stands still per checkpoint, in the background and in the foreground."""
    steps = 6 * options.every
    arguments = [
        *_MODEL,
        *_RUN,
        f"steps={steps}",
        *_sizes(options.hidden),
        f"checkpoint.every={options.every}",
    ]
    print("background   MiB   stands still, ms per checkpoint (median)   step, ms (median)")
    for background in (False, True):
        run_dir = folder / str(background)
        more = [f"run_dir={run_dir}", f"checkpoint.background={str(background).lower()}"]
        Job(options.ranks, [*arguments, *more], folder).finish()
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
        still = [row["checkpoint_seconds"] for row in rows if "checkpoint_seconds" in row]
        size = sum(each.size for each in check_sizes(checkpoints_in(run_dir / "checkpoints")[0]).values())
        # The first one makes the copies' memory.
        print(
            f"{background!s:10} {size / 2**20:5.0f}   {1e3 * statistics.median(still[1:]):40.1f}   "
            f"{1e3 * statistics.median(row['step_seconds'] for row in rows):17.1f}",
            flush=True,
        )


def _sizes(hidden: int) -> list[str]:
    return [f"model.hidden_size={hidden}", "model.num_layers=8"]


class Job:
    """`zbpp train` on some processes of this machine."""

    def __init__(self, num_ranks: int, arguments: list[str], folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._log = folder / f"{time.monotonic_ns()}.log"
        self._processes: list[Any] = [
            _CONTEXT.Process(target=_rank, args=(rank, num_ranks, port, arguments, self._log))
            for rank in range(num_ranks)
        ]
        for process in self._processes:
            process.start()

    def finish(self) -> None:
        """Wait for the end. Exits with 1 if a process failed."""
        for process in self._processes:
            process.join()
        if any(process.exitcode for process in self._processes):
            sys.exit(f"a run failed:\n{self._log.read_text()[-6000:]}")

    def kill_in_a_save(self, folder: Path, number: int, delay: float) -> bool:
        """Kill all processes some seconds after a save has begun; False if the run ended before.

        number: of the save, from 0; what a dead process has left may count as one.
        """
        seen: set[str] = set()
        while len(seen) <= number:
            seen |= {name for name in _names(folder) if re.fullmatch(r"step-\d+\.tmp", name)}
            if not all(process.is_alive() for process in self._processes):
                return False
            time.sleep(0.001)
        time.sleep(delay)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        return True


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _rank(rank: int, num_ranks: int, port: int, arguments: list[str], log: Path) -> None:
    import torch

    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), stream)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from zbpp.commands.train import main as train

    train(arguments)


if __name__ == "__main__":
    main()

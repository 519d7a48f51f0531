"""A part's rows, which all ranks find together and rank 0 writes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from zbpp.job.agreement import gather
from zbpp.job.world import World


@dataclass(frozen=True)
class Timeouts:
    """waiting: s that a rank waits for another; hanging: the same in part hang."""

    waiting: float = 180.0
    hanging: float = 30.0


class Check:
    """One part on one rank. is_small: a CPU does it in seconds. out: a folder for what a part leaves."""

    def __init__(self, here: World, timeouts: Timeouts, is_small: bool, out: Path) -> None:
        self.here, self.timeouts, self.is_small, self.out = here, timeouts, is_small, out
        self.num_failed, self._is_in_table = 0, False

    def write(self, text: str) -> None:
        """A line between tables."""
        if self.here.rank == 0:
            self._is_in_table = False
            print(f"\n{text}", flush=True)

    def row(
        self, name: str, found: Callable[[], str], predicted: str = "", *, is_alone: bool = False
    ) -> None:
        """Write the prediction, then what `found` returns, or FAILED and why. Collective, unless is_alone."""
        if self.here.rank == 0:
            if not self._is_in_table:
                print("\n| what | predicted | time | found |\n|---|---|---|---|")
            self._is_in_table = True
            print(f"| {name} | {predicted} | ", end="", flush=True)
        begin, problem, text = time.perf_counter(), "", ""
        try:
            text = found()
        except Exception as error:  # whatever it is belongs into the table
            problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        problems = [problem] if is_alone else gather(problem)
        for rank, each in enumerate(problems):
            if each:
                text = f"FAILED: rank {rank}: {each}"
        self.num_failed += any(problems)
        if self.here.rank == 0:
            print(f"{time.perf_counter() - begin:.1f} s | {text.replace('|', '/')} |", flush=True)


def machines(here: World) -> list[str]:
    """Software and nodes. Collective."""
    backend, device = "gloo", "CPU"
    if here.device.type == "cuda":
        backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, CUDA {torch.version.cuda}"
        gpu = torch.cuda.get_device_properties(here.device)
        device = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    found = gather((socket.gethostname(), device))
    lines = [f"{here.size} ranks, torch {torch.__version__}, {backend}"]
    for each in dict.fromkeys(found):
        ranks = [rank for rank, place in enumerate(found) if place == each]
        lines.append(f"{each[0]}: ranks {ranks[0]}-{ranks[-1]}, {each[1]}")
    if len({device for _, device in found}) > 1:
        lines.append(
            "The GPUs differ: give slower ones fewer layers (model.layers_per_stage), or schedule=auto"
        )
    return lines

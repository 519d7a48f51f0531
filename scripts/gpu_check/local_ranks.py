"""Ranks as processes of this machine, all on one GPU, joined by gloo."""

from __future__ import annotations

import faulthandler
import multiprocessing
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_check.page import Here
from zbpp.runtime import groups

_WAIT = 60.0  # s that a rank waits for another


def on_ranks(num_ranks: int, function: Callable[..., Iterator[Any]], here: Here, *args: Any) -> Iterator[Any]:
    """What `function(rank, here, *args)` yields on each rank, as lists over ranks, as soon as all have it.

    function: importable; yields values that pickle. Raises RuntimeError if a rank raises or dies.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        processes = [
            context.Process(
                target=_run, args=(rank, num_ranks, store, answers, function, here, args), daemon=True
            )
            for rank in range(num_ranks)
        ]
        for each in processes:
            each.start()
        try:
            yield from _in_order(num_ranks, answers, processes)
        finally:
            for each in processes:  # their answers are here, or will not come
                each.kill()
                each.join()


def _in_order(num_ranks: int, answers: Any, processes: Any) -> Iterator[list[Any]]:
    found: list[list[Any]] = [[] for _ in range(num_ranks)]
    num_given = num_ended = 0
    while num_ended < num_ranks:
        try:
            rank, kind, value = answers.get(timeout=1.0)
        except queue.Empty:
            dead = [rank for rank, each in enumerate(processes) if each.exitcode not in (None, 0)]
            if dead:
                raise RuntimeError(f"rank {dead[0]} died: {processes[dead[0]].exitcode}") from None
            continue
        if kind == "error":
            raise RuntimeError(f"rank {rank}: {value}")
        if kind == "end":
            num_ended += 1
            continue
        found[rank].append(value)
        while all(len(each) > num_given for each in found):
            yield [each[num_given] for each in found]
            num_given += 1


def _run(
    rank: int, num_ranks: int, store: Path, answers: Any, function: Any, here: Here, args: tuple[Any, ...]
) -> None:
    faulthandler.dump_traceback_later(max(1.0, here.limit - 5.0))
    torch.set_num_threads(1)
    if here.is_cuda:
        torch.cuda.set_device(here.device)
    else:  # the CPU takes part as a GPU would
        groups.needs_host_link = lambda group, device: True
    try:
        dist.init_process_group(
            "gloo", f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=_WAIT)
        )
        for value in function(rank, here, *args):
            answers.put((rank, "value", value))
        dist.barrier()  # whoever is killed now breaks no connection that another one needs
        answers.put((rank, "end", None))
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        answers.put((rank, "error", f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error

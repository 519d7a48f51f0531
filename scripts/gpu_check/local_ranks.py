"""Ranks as processes of this machine, all on one GPU, joined by gloo."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_check.page import Here
from gpu_check.parts import end_with_parent
from zbpp.runtime.processes import groups

_DUMP = 0.5  # s in which a rank writes where it stands


def on_ranks(num_ranks: int, function: Callable[..., Iterator[Any]], here: Here, *args: Any) -> Iterator[Any]:
    """What `function(rank, here, *args)` yields on each rank, as lists over ranks, as soon as all have it.

    function: importable; yields values that pickle. This process must not have run a backward: on a CPU ranks
    are forks of it. Raises RuntimeError if a rank raises or dies, or if no rank yields anything for a minute:
    then each rank writes the stacks of its threads to standard error.
    """
    # A fork can't use a GPU. On a CPU it saves the imports: two seconds of a core for each rank.
    if not here.is_cuda:
        importlib.import_module("torch._dynamo")  # models on the meta device would import it in each rank
    context: Any = multiprocessing.get_context("spawn" if here.is_cuda else "fork")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        processes = [
            context.Process(
                target=_run, args=(rank, num_ranks, store, writer, function, here, args), daemon=True
            )
            for rank, (_, writer) in enumerate(pipes)
        ]
        for each in processes:
            each.start()
        try:
            yield from _in_order([reader for reader, _ in pipes], processes, patience(here))
        finally:
            for each in processes:  # their answers are here, or will not come
                each.kill()
                each.join()


def patience(here: Here) -> float:
    """How many seconds all ranks may be silent; a CPU may have other work."""
    seconds: float = here.choose(60.0, 240.0)
    return seconds


def _in_order(readers: Sequence[Any], processes: Sequence[Any], limit: float) -> Iterator[list[Any]]:
    """The answers. A rank that fails does so after its last answer: what came before is given out first."""
    found: list[list[Any]] = [[] for _ in processes]
    failed, ended, num_given = dict[int, str](), set[int](), 0
    while len(ended) < len(processes):
        rank, kind, value = _next(readers, processes, {*failed, *ended}, limit)
        match kind:
            case "value":
                found[rank].append(value)
            case "end":
                ended.add(rank)
            case _:
                failed[rank] = f"rank {rank}: {value}"
        while all(len(each) > num_given for each in found):
            yield [each[num_given] for each in found]
            num_given += 1
        for other, how in failed.items():
            if len(found[other]) == num_given:
                raise RuntimeError(how)


def _next(readers: Sequence[Any], processes: Sequence[Any], gone: set[int], limit: float) -> Any:
    """The next (rank, kind, value) of a rank that is not gone."""
    here = [rank for rank in range(len(processes)) if rank not in gone]
    ready = wait([*(readers[rank] for rank in here), *(processes[rank].sentinel for rank in here)], limit)
    for rank in here:
        if readers[rank].poll():
            return rank, *readers[rank].recv()
    for rank in here:
        if processes[rank].sentinel in ready:
            processes[rank].join()
            return rank, "error", f"died, exit code {processes[rank].exitcode}"
    for rank in here:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(_DUMP)
    raise RuntimeError(f"no rank answered for {limit:.0f} s")


def _run(
    rank: int, num_ranks: int, store: Path, answers: Any, function: Any, here: Here, args: tuple[Any, ...]
) -> None:
    end_with_parent()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    if here.is_cuda:
        torch.cuda.set_device(here.device)
    else:  # the CPU takes part as a GPU would
        groups.needs_host_link = lambda group, device: True
    try:
        limit = timedelta(seconds=2 * patience(here))
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks, timeout=limit)
        for value in function(rank, here, *args):
            answers.send(("value", value))
        answers.send(("end", None))
        signal.pause()  # the parent ends all ranks: the end of one would break connections of others
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        answers.send(("error", f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from error

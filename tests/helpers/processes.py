"""Run a function on several real processes joined by gloo, and collect what each returns.

With ZBPP_TEST_BACKEND=strict in the environment a backend with NCCL's rules joins them, see nccl_rules.py.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers import nccl_rules

_BACKEND = os.environ.get("ZBPP_TEST_BACKEND", "gloo")
_CONTEXT = multiprocessing.get_context("forkserver")
# The server imports once what each rank needs, at last what the first optimizer of a process imports: six
# seconds of a core. The test's own module, which a rank imports itself, takes a few hundredths then.
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "zbpp.run.app",
        "zbpp.models.gpt",
        "zbpp.models.llama",
        "torch.distributed.fsdp",
        "torch._dynamo",
    ]
)


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 200.0, backend: str = _BACKEND
) -> list[Any]:
    """[function(rank, *args) of each rank]; `function` must be importable. Raises what a rank raised."""
    results = outcomes(function, num_ranks, *args, timeout=timeout, backend=backend)
    for rank, (succeeded, result) in enumerate(results):
        if not succeeded:
            raise RuntimeError(f"rank {rank} failed:\n{result}")
    return [result for _, result in results]


def outcomes(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 200.0, backend: str = _BACKEND
) -> list[tuple[bool, Any]]:
    """Per rank (True, result) or (False, traceback): for tests of what happens when a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            arguments = (sender, function, rank, num_ranks, Path(folder) / "store", args, backend)
            process = _CONTEXT.Process(target=_main, args=arguments)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        results = [_receive(pipe, timeout) for pipe in pipes]
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    return results


def open_things() -> tuple[int, int]:
    """How many process groups this process has, and how many files and sockets."""
    gc.collect()
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))


def _receive(pipe: Any, timeout: float) -> tuple[bool, Any]:
    if not pipe.poll(timeout):
        return False, f"no answer within {timeout} s"
    try:
        answer: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "the process died without a word"
    return answer


def _main(
    pipe: Any,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    store: Path,
    args: tuple[Any, ...],
    backend: str,
) -> None:
    torch.set_num_threads(1)
    try:
        if num_ranks > 1:
            nccl_rules.register()
            dist.init_process_group(
                backend, f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=100)
            )
            dist.barrier()  # whoever leaves now breaks no connection that others are still making
        answer = (True, function(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # plain pickle: shared-memory tensors die with their process
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()

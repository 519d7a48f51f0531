"""Run a function on several real processes joined by gloo, and collect what each returns.

The processes live for the whole test run. Each call joins some of them in new process groups, and afterwards
takes back what the function set: random states, default dtype, environment. After a failure, and where a
thread, a patched function or a DeviceMesh (in DTensor's caches) is left over, new processes take their place.

With ZBPP_TEST_BACKEND=strict in the environment a backend with NCCL's rules joins them, see nccl_rules.py.
With device="cuda" or "npu" the processes have an emulated accelerator, see tests/accelerator/.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import threading
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accelerator.processes import environment
from helpers import nccl_rules
from zbpp import tracebacks

tracebacks._OWN = "nowhere"  # the traceback of a rank that fails shows zbpp's frames
_BACKEND = os.environ.get("ZBPP_TEST_BACKEND", "gloo")
_CONTEXT = multiprocessing.get_context("forkserver")
# The server imports once what each rank needs, what the first optimizer of a process imports, and what all
# Hugging Face models share (left out where transformers is missing): eight seconds of a core. The test's own
# module, which a rank imports itself, takes a few hundredths then.
_PRELOADED = [
    "pytest",
    "zbpp.run.app",
    "zbpp.models.gpt",
    "zbpp.models.llama",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "zbpp.models.hf",
    "transformers.models.llama.modeling_llama",
]
_CONTEXT.set_forkserver_preload(_PRELOADED)


class _Worker(NamedTuple):
    process: Any
    pipe: Any


class _Call(NamedTuple):
    function: Callable[..., Any]
    rank: int
    num_ranks: int
    store: Path
    args: tuple[Any, ...]
    backend: str
    fresh: bool
    device: str


_idle: defaultdict[str, list[_Worker]] = defaultdict(list)  # by device
_servers: dict[str, forkserver.ForkServer] = {}  # by device, for those that aren't the CPU


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, **options: Any) -> list[Any]:
    """[function(rank, *args) of each rank]; `function` must be importable. Raises what a rank raised.

    options: those of `outcomes`.
    """
    results = outcomes(function, num_ranks, *args, **options)
    for rank, (succeeded, result) in enumerate(results):
        if not succeeded:
            raise RuntimeError(f"rank {rank} failed:\n{result}")
    return [result for _, result in results]


def outcomes(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout: float = 200.0,
    backend: str = _BACKEND,
    fresh: bool = False,
    device: str = "cpu",
) -> list[tuple[bool, Any]]:
    """Per rank (True, result) or (False, traceback): for tests of what happens when a rank fails.

    fresh: in new processes, which end with their answer: so a rank that waits for another one notices.
    device: "cuda" or "npu" gives the processes an accelerator; device number `rank` is the current one. What
    the function returns must lie on the CPU. Without a compiler the test is skipped.
    """
    idle = _idle[device]
    workers = [_new_worker(device) if fresh or not idle else idle.pop() for _ in range(num_ranks)]
    results: list[tuple[bool, Any]] = []
    are_clean = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for rank, worker in enumerate(workers):
                call = _Call(function, rank, num_ranks, Path(folder) / "store", args, backend, fresh, device)
                worker.pipe.send((os.getcwd(), dict(os.environ), sys.path, pickle.dumps(call)))
            for worker in workers:
                result, is_clean = _receive(worker.pipe, timeout)
                results.append(result)
                are_clean.append(is_clean)
            # A rank leaves its groups after its answer.
            are_clean = [
                clean and _receive(w.pipe, 5.0)[1] for clean, w in zip(are_clean, workers, strict=True)
            ]
    finally:
        succeeded = [ok for ok, _ in results]
        keep = len(are_clean) == num_ranks and all(are_clean) and all(succeeded)
        for worker in workers:
            if keep:
                idle.append(worker)
            else:
                _end(worker)
    return results


def open_things() -> tuple[int, int]:
    """How many process groups this process has, and how many files and sockets."""
    gc.collect()
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))


def _new_worker(device: str) -> _Worker:
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(there,), daemon=True)
    if device == "cpu":
        process.start()
    else:
        # multiprocessing knows one server. Each accelerator has its own, which loads it before torch.
        if device not in _servers:
            _servers[device] = forkserver.ForkServer()
            _servers[device].set_forkserver_preload(_PRELOADED)
        connect = _servers[device].connect_to_new_process
        with (
            mock.patch.dict(os.environ, environment(device)),
            mock.patch.object(forkserver, "connect_to_new_process", connect),
        ):
            process.start()
    there.close()
    return _Worker(process, here)


def _end(worker: _Worker) -> None:
    worker.pipe.close()  # at the end of its pipe a worker ends
    worker.process.join(2)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _receive(pipe: Any, timeout: float) -> tuple[tuple[bool, Any], bool]:
    try:
        if not pipe.poll(timeout):
            return (False, f"no answer within {timeout} s"), False
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        return (False, "the process died without a word"), False


# ---------------------------------------------------------------- in the worker


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported is not searched after each call
    settings, functions, num_modules = _settings(), _functions(), len(sys.modules)
    while True:
        try:
            cwd, environment, path, pickled = pipe.recv()
        except EOFError:
            return
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        call: _Call | None = None
        try:
            call = pickle.loads(pickled)  # imports the test's module
            if len(sys.modules) > num_modules:
                functions = _functions()
            answer = True, _run(call)
        except BaseException:
            answer = False, traceback.format_exc()
        # Plain pickle: a tensor in shared memory dies with its process.
        pipe.send_bytes(pickle.dumps((answer, True)))
        if call is None or call.fresh:
            if dist.is_initialized():
                dist.destroy_process_group()
            return
        before, functions, num_modules = functions, _functions(), len(sys.modules)
        is_clean = _clean_up(settings) and not before.items() - functions.items()
        pipe.send_bytes(pickle.dumps((None, is_clean)))


def _run(call: _Call) -> Any:
    if call.device != "cpu":
        torch.accelerator.set_device_index(call.rank)
    if call.num_ranks > 1:
        nccl_rules.register()
        dist.init_process_group(
            call.backend,
            f"file://{call.store}",
            rank=call.rank,
            world_size=call.num_ranks,
            timeout=timedelta(seconds=100),
        )
        dist.barrier()  # whoever leaves now breaks no connection that others are still making
    result = call.function(call.rank, *call.args)
    if call.device != "cpu":
        from accelerator import reports

        faults = reports.taken_faults()
        assert not faults, "accesses to the device's memory that no event orders:\n" + "\n".join(faults)
    return result


def _settings() -> list[tuple[Callable[[Any], Any], Any]]:
    """What a call may set for its process: (how to set it, its value in a new process)."""
    return [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
        (torch.set_rng_state, torch.get_rng_state()),
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
        (torch.set_num_threads, 1),
        (torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled()),
        (logging.disable, logging.root.manager.disable),
        (logging.root.setLevel, logging.root.level),
        (_set_handlers, logging.root.handlers[:]),
        (_set_warnings, warnings.filters[:]),
    ]


def _functions() -> dict[tuple[str, str, str], int]:
    """{(module, class or "", name): id} of the functions and classes that tests patch."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "zbpp" and name not in ("time", "torch", "torch.distributed"):
            continue
        for attribute, value in list(vars(module).items()):
            if attribute == "reduce_op":  # torch warns when it is looked at
                continue
            if callable(value):
                found[name, "", attribute] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found |= {(name, attribute, key): id(each) for key, each in vars(value).items()}
    return found


def _set_handlers(handlers: list[logging.Handler]) -> None:
    logging.root.handlers[:] = handlers


def _set_warnings(filters: Any) -> None:
    warnings.resetwarnings()
    warnings.filters[:] = filters


def _clean_up(settings: list[tuple[Callable[[Any], Any], Any]]) -> bool:
    """Take back what a call set; False if it holds something that can't be taken back."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for restore, value in settings:
        restore(value)
    if torch._dynamo.utils.counters:  # something was compiled
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    gc.collect()
    has_mesh = any(type(each) is DeviceMesh for each in gc.get_objects())
    # A thread of autograd's, as a device has one, is a dummy to Python. It stays.
    threads = [each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)]
    return len(threads) == 1 and not has_mesh

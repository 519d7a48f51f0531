"""The GPUs of a job, as its ranks see them: does each rank have one of its own, and are they of one kind?

NCCL refuses two ranks on one GPU when they first communicate, in words about its internals. Here the ranks
tell each other through the job's store which GPU they have, before any process group is made.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from zbpp.runtime.joining import StartError
from zbpp.runtime.roll_call import ranks_text


class Gpu(NamedTuple):
    """A rank's GPU. identity: differs between any two GPUs. memory: in bytes."""

    host: str
    name: str
    identity: str
    memory: int


def gpu_of(device: torch.device) -> Gpu:
    """What torch says of a CUDA device. This is the only function here that asks the device."""
    found: Any = torch.cuda.get_device_properties(device)
    host = socket.gethostname()
    # ROCm gives no UUID for some cards: then the place on the host's bus.
    places = [getattr(found, f"pci_{name}_id", "") for name in ("domain", "bus", "device")]
    identity = str(getattr(found, "uuid", "")) or ":".join([host, *map(str, places)])
    return Gpu(host, str(found.name), identity, int(found.total_memory))


def told_by_all(store: Any, rank: int, size: int, gpu: Gpu, timeout: float) -> list[Gpu]:
    """The GPU of each rank. Collective over the job. Raises StartError if a rank does not tell."""
    store.set(f"gpu/{rank}", json.dumps(gpu))
    keys = [f"gpu/{each}" for each in range(size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
        return [Gpu(*json.loads(store.get(key))) for key in keys]
    except RuntimeError as error:
        missing = list[int]()
        with suppress(RuntimeError):  # the store may be gone, and with it rank 0
            missing = [each for each in range(size) if not store.check([f"gpu/{each}"])]
        raise StartError(f"{ranks_text(missing or [0])} did not say which GPU it has: {error}") from error


def shared_gpu(gpus: Sequence[Gpu]) -> str:
    """What is wrong if two ranks have one GPU; "" if each has one of its own."""
    owners: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        owners.setdefault(gpu.identity, []).append(rank)
    shared = [ranks for ranks in owners.values() if len(ranks) > 1]
    if not shared:
        return ""
    ranks, gpu = shared[0], gpus[shared[0][0]]
    more = f", and {len(shared) - 1} more GPUs are shared" if len(shared) > 1 else ""
    return (
        f"{ranks_text(ranks)} have one GPU, {gpu.name} ({gpu.identity}) of {gpu.host}{more}: NCCL takes one "
        "rank on each GPU. Start as many processes on a node as it has GPUs (torchrun "
        "--nproc-per-node=gpu), let no wrapper give all of them the same CUDA_VISIBLE_DEVICES or LOCAL_RANK, "
        "or write device=cpu (zbpp train: parallel.device=cpu)"
    )


def note_of_kinds(gpus: Sequence[Gpu]) -> str:
    """A line on GPUs of several kinds, and what a plan assumes of them; "" for GPUs of one kind."""
    kinds: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        kinds.setdefault(f"{gpu.name} ({gpu.memory / 2**30:.0f} GiB)", []).append(rank)
    if len(kinds) < 2:
        return ""
    return (
        f"the job's GPUs differ: {_by_kind(kinds)}. A schedule by name and equal layers per stage assume "
        "ranks of one speed and one memory, so the slowest GPU sets the pace, the smallest the limit: give "
        "slower GPUs fewer layers (model.layers_per_stage), and let schedule=auto plan for measured times"
    )


def _by_kind(kinds: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(f"{kind} on {_short(ranks)}" for kind, ranks in kinds.items())


def _short(ranks: Sequence[int]) -> str:
    """`ranks 0-7, 12`: consecutive numbers as a range."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"

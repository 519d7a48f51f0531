"""The nodes of the job: how many ranks each has, on which GPUs, with which software."""

from __future__ import annotations

import platform
import socket
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from zbpp.benchmark.cluster.rows import NOTE, OK
from zbpp.job.agreement import gather
from zbpp.job.world import World

if TYPE_CHECKING:
    from zbpp.benchmark.cluster.parts import Found, Step


def hosts_of_ranks() -> list[str]:
    """The host name of each rank. Collective."""
    return gather(socket.gethostname())


def steps(here: World) -> Iterator[Step]:
    """A row for the software, a row for each node, and one if GPUs differ. Collective."""
    yield "software", lambda: _software(here)
    hosts = hosts_of_ranks()
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, each in enumerate(hosts) if each == host]
        yield host, lambda ranks=ranks: _node(here, ranks)  # type: ignore[misc]
    if here.device.type == "cuda":
        yield "kinds of GPUs", lambda: _kinds(here)


def _software(here: World) -> Found:
    numbers: dict[str, Any] = {
        "ranks": here.size,
        "device": here.device.type,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if here.device.type == "cuda":
        numbers |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    backend = f"NCCL {numbers['nccl']}, CUDA {numbers['cuda']}" if "nccl" in numbers else "gloo"
    return OK, f"{here.size} ranks, torch {torch.__version__}, {backend}", numbers


def _node(here: World, ranks: list[int]) -> Found:
    names = gather(_device(here.device))
    kinds = dict.fromkeys(names[rank] for rank in ranks)
    text = f"ranks {ranks[0]}-{ranks[-1]}: {', '.join(kinds)}"
    return OK, text, {"ranks": ranks, "devices": [names[rank] for rank in ranks]}


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    gpu: Any = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"


def _kinds(here: World) -> Found:
    kinds = Counter(gather(_device(here.device)))
    if len(kinds) == 1:
        return OK, "all alike", {}
    told = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return NOTE, f"{told}: give slower ones fewer layers (model.layers_per_stage), or schedule=auto", {}

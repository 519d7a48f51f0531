"""How long messages take between two ranks that do nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from zbpp.job.agreement import gather

_SMALL, _LARGE = 4, 8 * 2**20  # bytes: the small message shows the latency, the large one the bandwidth
_ROUNDS = 20


class LinkSpeed(NamedTuple):
    """How fast messages pass between two ranks: the time of 4 bytes, the bandwidth of 8 MiB."""

    ranks: tuple[int, int]
    latency_ms: float
    gigabytes_per_second: float


def link_speeds(links: Iterable[tuple[int, int]], device: torch.device) -> list[LinkSpeed]:
    """The speed between each two ranks that have a link, one pair after another. Collective.

    links: as `Programs.links` has them; both directions of a pair count as one.
    """
    pairs = sorted({(min(link), max(link)) for link in links})
    found = {}
    for pair in pairs:
        dist.barrier()
        if dist.get_rank() in pair:
            found[pair] = _speed(pair, device)
    everyone: dict[tuple[int, int], LinkSpeed] = {}
    for each in gather(found):
        everyone |= each
    return [everyone[pair] for pair in pairs]


def _speed(pair: tuple[int, int], device: torch.device) -> LinkSpeed:
    small, large = (_one_way_ms(pair, num_bytes, device) for num_bytes in (_SMALL, _LARGE))
    return LinkSpeed(pair, small, _LARGE / 1e6 / large)


def _one_way_ms(pair: tuple[int, int], num_bytes: int, device: torch.device) -> float:
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    first = dist.get_rank() == pair[0]
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for sends in (first, not first):
            if sends:
                dist.send(message, dst=pair[first])
            else:
                dist.recv(message, src=pair[first])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3 / 2)
    return median(times[1:])  # the first one connects

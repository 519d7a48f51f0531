"""How long copies to host memory and back take, with nothing else running."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
import torch.distributed as dist

from zbpp.autograd.offload.host_copier import Copier, Copy, Moves
from zbpp.job.agreement import gather
from zbpp.schedule import Timetable

_PIECE = 8 * 2**20  # bytes; what F saves is in many tensors, and a copy moves one after the other
_ROUNDS = 5


def host_ms(timetable: Timetable, nbytes: Sequence[int], device: torch.device) -> list[float]:
    """Costs.host: for each stage, the time of copying `nbytes[stage]` in the slower direction. Collective.

    All ranks copy at the same time, since they do so in training, and may share the host's memory bus.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = {stage: nbytes[stage] for stage in timetable.stages_of(rank)}
    if dist.is_initialized():
        dist.barrier()
    found: dict[int, float] = {}
    for each in gather(_times(mine, device)):
        found |= each
    return [found[stage] for stage in range(timetable.num_stages)]


def _times(nbytes: Mapping[int, int], device: torch.device) -> dict[int, float]:
    copier = Copier(device)
    try:
        return {stage: _slower_ms(copier, size) for stage, size in nbytes.items()}
    finally:
        copier.close()


def _slower_ms(copier: Copier, nbytes: int) -> float:
    """The median time of a copy of `nbytes`, out or back, whichever takes longer."""
    sizes = [min(_PIECE, nbytes - start) for start in range(0, nbytes, _PIECE)]
    pairs: Moves = []
    for size in sizes:
        storage = copier.new_storage(size)
        torch.empty(0, dtype=torch.uint8, device=copier.device).set_(
            storage
        ).zero_()  # so that the system has mapped the pages before a copy is timed
        pairs.append((storage, copier.host_memory(size)))
    return max(
        median(_ms(copier, start, pairs) for _ in range(_ROUNDS)) for start in (copier.out, copier.back)
    )


def _ms(copier: Copier, start: Callable[[Moves], Copy], pairs: Moves) -> float:
    _synchronise(copier.device)
    begin = time.perf_counter()
    start([*pairs]).wait()
    _synchronise(copier.device)
    return (time.perf_counter() - begin) * 1e3


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

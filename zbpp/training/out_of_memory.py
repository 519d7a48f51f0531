"""What an error about memory is told besides: the rank, what it had allocated, and where to look next."""

from __future__ import annotations

import torch

from zbpp.runtime.measure import peak_memory_bytes

_OF_CPU = "DefaultCPUAllocator"  # torch raises a plain RuntimeError on the CPU


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OF_CPU in str(error)


def note_memory(error: BaseException, rank: int, device: torch.device) -> None:
    """Note on an error about memory what this rank measured. The error keeps its type; others stay alone."""
    if not is_out_of_memory(error):
        return
    peak = peak_memory_bytes(device)
    kind = "allocated on its device" if device.type == "cuda" else "resident in its process"
    error.add_note(
        f"rank {rank} is out of memory; its peak so far: {peak / 2**30:.3f} GiB {kind}. `zbpp memory`, with "
        "the arguments of this run and memory.limit=GIB of a rank's device, predicts each rank's peak and "
        "lists the switches that make it fit"
    )

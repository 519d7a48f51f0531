"""Adds to an out-of-memory error: which rank, in which action, and how much memory it had allocated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zbpp.job.errors import is_out_of_memory
from zbpp.runtime.measure import peak_memory_bytes

_ACTION = re.compile(r"in (\d+(?:F|BW|B|W)\d+) ")  # a note of the Executor
_UPDATE = "the update"


@contextmanager
def updating() -> Iterator[None]:
    """Note on an error about memory that the optimizer's step raised it."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(f"in {_UPDATE}: the norm of the gradients and the optimizer's step")
        raise


def failed_at(error: BaseException) -> str:
    """The action whose error this is, such as 0F3, or `the update`; "" if it is neither."""
    for note in getattr(error, "__notes__", ()):
        found = _ACTION.match(note)
        if found:
            return found[1]
        if note.startswith(f"in {_UPDATE}"):
            return _UPDATE
    return ""


def measured(rank: int, num_processes: int, doing: str, device: torch.device) -> str:
    """A line about the rank of the job that is out of memory. doing: `in 0F3`, `while it ...`."""
    peak = peak_memory_bytes(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        kind = f"allocated on its device, which has {total / 2**30:.3f} GiB"
    else:
        kind = "resident in its process"
    of = f" of {num_processes}" if num_processes > 1 else ""
    return f"rank {rank}{of} is out of memory {doing}; its peak so far: {peak / 2**30:.3f} GiB {kind}"

"""Is an error one about memory, and how long may a rank take to explain it?"""

from __future__ import annotations

import torch

_LONGEST = 15.0  # s
_SHARE = 0.6  # of the timeout: the rest is left for the end of the job
_OF_CPU = "DefaultCPUAllocator"  # torch raises a plain RuntimeError on the CPU


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OF_CPU in str(error)


def seconds_to_explain(timeout: float) -> float:
    """How long a rank that is out of memory may take to say what would fit; the other ranks wait for it.

    timeout: how long ranks wait for each other, in seconds.
    """
    return min(_LONGEST, _SHARE * timeout)

"""More threads for the update of weights that are in host memory.

A rank has one thread by default, so that products are summed up in one order whatever the number of ranks
(see set_threads in zbpp/launch.py). An update of 1e9 weights by one thread takes seconds. Adam and AdamW
compute each element alone, with the same bits by any number of threads. So does SGD with momentum, but the
last elements of a thread's part are computed by other instructions, which round otherwise.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_EQUAL = (torch.optim.Adam, torch.optim.AdamW)


def update_on_all_cores(optimizer: torch.optim.Optimizer) -> None:
    """Let each step of an optimizer use this process's share of the cores, where the bits stay the same."""
    if type(optimizer) not in _EQUAL:
        return
    before = torch.get_num_threads()

    def more(*_: Any) -> None:
        nonlocal before
        before = torch.get_num_threads()
        torch.set_num_threads(max(before, cores_of_process()))

    optimizer.register_step_pre_hook(more)
    optimizer.register_step_post_hook(lambda *_: torch.set_num_threads(before))


def cores_of_process() -> int:
    """The cores that this process may use, divided by the number of the job's processes on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

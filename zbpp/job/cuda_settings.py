"""Settings of CUDA that a pipeline on NCCL needs; a setting that the user made stays.

On NCCL a receive that has started is a kernel that waits for another rank. What waits for such a kernel
without need slows a step down or hangs it, so three settings are others than CUDA's and torch's own.
"""

from __future__ import annotations

import logging
import os

_log = logging.getLogger(__name__)

_ENVIRONMENT = {
    # A kernel that is loaded at its first use waits for all kernels that run.
    "CUDA_MODULE_LOADING": "EAGER",
    # A kernel that waits holds up all streams that share its hardware queue; by default there are 8 queues.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}


def set_environment() -> None:
    """Set what CUDA reads when a process uses it first. `import zbpp` calls this."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def warn_of_lazy_loading() -> None:
    """Say that kernels are loaded at their first use, where the environment asked for it before zbpp came."""
    if os.environ.get("CUDA_MODULE_LOADING", "").upper() == "LAZY":
        _log.warning(
            "CUDA_MODULE_LOADING=LAZY in the environment loads a kernel at its first use. That waits for all "
            "kernels that run, also for a receive of NCCL, so a later step may hang: unset it"
        )


def use_expandable_segments() -> None:
    """Let torch give memory back to a full device without a wait for all kernels.

    Without expandable segments the allocator calls cudaFree, which waits for receives of other ranks, too. If
    these wait for this rank, the job hangs where it should say that the memory is full.
    """
    import torch

    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # torch.cuda's own function for it warns on 2.13, where this one took its place, and will go.
        general = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (general or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def check_launches() -> None:
    """Raise ValueError if the host waits for each kernel: a receive is a kernel until its message comes."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise ValueError(
            "CUDA_LAUNCH_BLOCKING=1 makes the host wait for each kernel, and a receive of NCCL is a kernel "
            "that waits for another rank, which would wait for this one: unset it, or run with one rank"
        )

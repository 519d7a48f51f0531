"""The elementwise part of a head's loss as one kernel per pass, for 16-bit logits on a GPU.

    bytes of memory traffic per logit   forward                           backward
    one operation after the other       cast 6, log_softmax 8             cast 6, softmax 8, multiply 6
    one kernel                          at most 2 reads: 4                a read, a write: 4

torch.compile makes the kernels. Where it can't (no Triton, no C compiler) the operations run one after the
other. On a CPU they always do. NOT RUN ON A GPU YET: tests compile the same functions for a CPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


def losses_and_lse(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The losses and the logsumexp of each row, float32 [rows, 1]; labels: int64 [rows, 1]."""
    z = logits.float()
    lse = z.logsumexp(1, keepdim=True)
    losses = lse - z.gather(1, labels)
    if smoothing:
        losses = losses.lerp(lse - z.mean(1, keepdim=True), smoothing)
    return losses, lse


def write_gradient(
    logits: Tensor,
    dz: Tensor,
    labels: Tensor,
    at_target: Tensor,
    scale: Tensor,
    lse: Tensor,
    smoothing: float,
) -> None:
    """Write (softmax + at_target at the label) * scale to dz, which may be the logits; only dz is rounded.

    lse: the logsumexp of each row: with it each number depends on one logit alone.
    """
    probabilities = (logits.float() - lse).exp()
    if smoothing:
        probabilities = probabilities + at_target * (smoothing / logits.shape[1])
        at_target = at_target * (1 - smoothing)
    words = torch.arange(logits.shape[1], device=logits.device)
    dz.copy_((probabilities + torch.where(words == labels, at_target, 0)) * scale)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled at its first call, and again for other shapes; uncompiled if that fails."""
    fast = torch.compile(function)
    can_compile = True

    def run(*args: Any) -> Any:
        nonlocal can_compile
        if can_compile:
            try:
                return fast(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a compiler may raise anything
                _log.warning("%s runs uncompiled: torch.compile fails: %s", function.__name__, error)
                can_compile = False
        return function(*args)

    return run


def has_kernels(logits: Tensor) -> bool:
    """Whether the loss of these logits takes one kernel per pass."""
    return logits.device.type == "cuda" and logits.element_size() == 2


def whole_waves(num_rows: int, device: torch.device) -> int:
    """A number of rows near this one that keeps a GPU busy: a multiple of its multiprocessors.

    Each of them works on one row at a time: 133 rows would take as long as 264 on 132 multiprocessors.
    """
    if device.type != "cuda":
        return num_rows
    processors = num_multiprocessors(device)
    return max(1, num_rows // processors) * processors


def num_multiprocessors(device: torch.device) -> int:
    """The number of a GPU's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count

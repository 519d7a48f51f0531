"""Times, bytes and differences, measured alike by all parts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from gpu_check.page import Here
from zbpp.measure.live_tensors import live_bytes

MIB = 2**20
_AHEAD = 10_000_000  # cycles of the device, about 5 ms


def ms_of(here: Here, run: Callable[[], object], *, rounds: int = 7) -> float:
    """The median time (ms) of a run on the device; two runs before are not counted."""
    return phases_ms(here, {"": run}, rounds=rounds)[""]


def phases_ms(here: Here, phases: Mapping[str, Callable[[], object]], *, rounds: int = 7) -> dict[str, float]:
    """Each phase's median time (ms) on the device, the phases run in turn; two rounds are not counted.

    Each round begins behind a kernel that sleeps: meanwhile the host runs ahead, and the device has no gaps.
    """
    rounds = here.choose(rounds, 2)
    found: dict[str, list[float]] = {name: [] for name in phases}
    for _ in range(rounds + here.choose(2, 1)):
        if here.is_cuda:
            torch.cuda._sleep(_AHEAD)
        marks = [_now(here)]
        for run in phases.values():
            run()
            marks.append(_now(here))
        here.synchronize()
        for name, (begin, end) in zip(phases, pairwise(marks), strict=True):
            found[name].append(begin.elapsed_time(end) if here.is_cuda else 1e3 * (end - begin))
    return {name: median(times[-rounds:]) for name, times in found.items()}


def peak_mib(here: Here, run: Callable[[], object]) -> float:
    """The most live bytes (MiB) in a run, over those before it."""
    return live_bytes(run, here.device).highest / MIB


def error_of(found: Tensor, exact: Tensor) -> float:
    """The norm of the error over the norm of the exact value."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def digest(tensors: Mapping[str, Tensor | None]) -> dict[str, str]:
    """A hash of each tensor's bits."""
    found = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
            found[name] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
    return found


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the last bit, on the device."""
    return torch.equal(*(each.detach().contiguous().view(torch.uint8) for each in (one, other)))


def unlike(some: Mapping[str, Any], others: Mapping[str, Any]) -> int:
    """How many names have different values, or are in one of the mappings only."""
    return sum(some.get(name) != others.get(name) for name in some.keys() | others.keys())


def gradients(modules: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """{parameter's name: its gradient} of all stages."""
    named = (each for module in modules.values() for each in module.named_parameters())
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def _now(here: Here) -> Any:
    if not here.is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

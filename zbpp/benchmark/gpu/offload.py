"""Part offload: how fast activations leave and come back, and how much of that time computation hides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zbpp.autograd.offload.host_copier import Copier, copier_for
from zbpp.benchmark.gpu.rows import Row
from zbpp.benchmark.gpu.settings import Settings
from zbpp.planning import plan
from zbpp.runtime import ActivationOffload, Pipeline
from zbpp.runtime.measure.memory import live_bytes
from zbpp.schedule import Costs

_GIB, _NUM_ROUNDS, _NUM_MICROBATCHES = 2**30, 5, 6


def rows(settings: Settings) -> Iterator[Row]:
    """Bandwidth, overlap, and a pipeline of one rank with and without offload."""
    nbytes = 4 * 2**20 if settings.is_small else 512 * 2**20
    copier = copier_for(settings.torch_device)
    try:
        out, back = _copies(copier, nbytes)
        out_s, back_s = _seconds(out, settings), _seconds(back, settings)
        yield Row(
            f"bandwidth with {nbytes / 2**20:g} MiB, GiB/s",
            {"out": nbytes / _GIB / out_s, "back": nbytes / _GIB / back_s},
            ".1f",
        )
        yield from _overlap(out, back, out_s + back_s, settings)
    finally:
        copier.close()
    yield from _pipelines(settings)


def _copies(copier: Copier, nbytes: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Functions that copy memory out and back, and wait as B would."""
    storage, host = copier.new_storage(nbytes), copier.host_memory(nbytes)

    def out() -> None:
        copier.out([(storage, host)]).wait()

    def back() -> None:
        copier.back([(storage, host)]).wait()

    return out, back


def _seconds(run: Callable[[], object], settings: Settings) -> float:
    """The median time of a run until the device is done; a first run is not counted."""
    times = []
    for _ in range(_NUM_ROUNDS + 1):
        settings.synchronize()
        begin = time.perf_counter()
        run()
        settings.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def _overlap(
    out: Callable[[], None], back: Callable[[], None], copy_s: float, settings: Settings
) -> Iterator[Row]:
    """Products that take about as long as the copies, alone and beside them."""
    size = 256 if settings.is_small else 4096
    x = torch.randn(size, size, device=settings.torch_device, dtype=settings.dtype)
    one = _seconds(lambda: _products(x, 4), settings) / 4
    number = max(1, round(copy_s / one))
    nbytes = 4 * 2**20 if settings.is_small else 512 * 2**20
    copier = copier_for(settings.torch_device)
    storage, host = copier.new_storage(nbytes), copier.host_memory(nbytes)

    def both() -> None:
        leaving = copier.out([(storage, host)])
        arriving = copier.back([(storage, host)])
        _products(x, number)
        leaving.wait()
        arriving.wait()

    try:
        compute_s, both_s = _seconds(lambda: _products(x, number), settings), _seconds(both, settings)
    finally:
        copier.close()
    hidden = (compute_s + copy_s - both_s) / min(compute_s, copy_s)
    yield Row(
        "copies beside products, ms",
        {"products": 1e3 * compute_s, "copies": 1e3 * copy_s, "both at once": 1e3 * both_s},
    )
    yield Row("share of the shorter one that is hidden", {"hidden": max(0.0, min(1.0, hidden))})


def _products(x: Tensor, number: int) -> None:
    for _ in range(number):
        torch.mm(x, x)


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.first, self.second = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(F.gelu(self.first(self.norm(x))))
        return y


def _pipelines(settings: Settings) -> Iterator[Row]:
    """GPipe on one rank: all F come first, so the activations of all microbatches wait for B."""
    found = {
        "no offload": _pipeline(settings, None),
        "all that can": _pipeline(settings, ActivationOffload(costs=Costs(f=2, b=2, w=2, host=0.1))),
    }
    ms = {name: each.ms for name, each in found.items()}
    yield Row("gpipe on one rank: a step, ms", ms)
    peaks = {name: each.peak / 2**20 for name, each in found.items()}
    yield Row("most live bytes of a step, MiB", peaks, ".1f")
    plain = found.pop("no offload").losses
    differ = {name: float((each.losses != plain).sum()) for name, each in found.items()}
    yield Row("losses that differ", differ, ".0f")


class _Step(NamedTuple):
    ms: float
    peak: int  # the most live bytes
    losses: Tensor


def _pipeline(settings: Settings, offload: ActivationOffload | None) -> _Step:
    size, num_rows = (64, 128) if settings.is_small else (2048, 4096)
    torch.manual_seed(0)
    stage = nn.Sequential(*[_Block(size) for _ in range(4)]).to(settings.torch_device, settings.dtype)
    x = torch.randn(_NUM_MICROBATCHES * num_rows, size, generator=torch.Generator().manual_seed(1))
    x = x.to(settings.torch_device, settings.dtype)
    extras = [] if offload is None else [offload]
    with Pipeline({0: stage}, plan("gpipe", 1, _NUM_MICROBATCHES), F.mse_loss, extras=extras) as pipeline:
        for _ in range(3):
            losses = pipeline.step(x, target=x)
        seconds = _seconds(lambda: pipeline.step(x, target=x), settings)
        level = live_bytes(lambda: pipeline.step(x, target=x), settings.torch_device)
    return _Step(1e3 * seconds, level.highest, torch.stack(losses))

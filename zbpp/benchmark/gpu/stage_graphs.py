"""Part split, at its end: the same stage in a pipeline of one rank, eager and by CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbpp.benchmark.gpu.rows import Row
from zbpp.benchmark.gpu.settings import Settings
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.runtime.graphs import CudaGraphs
from zbpp.runtime.measure.memory import live_bytes

_NUM_MICROBATCHES = 4
_TITLE = "CUDA graphs of this stage"


class _Steps(NamedTuple):
    step_ms: float  # until the device has done a step
    host_ms: float  # until `step` returns
    peak: int  # the most live bytes of a step, over those before it
    losses: Tensor


def rows(stage: nn.Module, x: Tensor, settings: Settings) -> Iterator[Row]:
    """Times and memory of a step under ZB-H1. x: of one microbatch."""
    if not settings.is_cuda:
        yield Row(f"{_TITLE}: not measured: they need a GPU")
        return
    eager, graphs = (_steps(stage, x, settings, has_graphs=each) for each in (False, True))
    found = {"eager": eager, "graphs": graphs}
    what = f"a step of {_NUM_MICROBATCHES} microbatches"
    yield Row(f"{what}, ms", {name: each.step_ms for name, each in found.items()})
    yield Row(f"{what}: host time, ms", {name: each.host_ms for name, each in found.items()})
    peaks = {name: each.peak / 2**20 for name, each in found.items()}
    yield Row(f"{what}: most live bytes, MiB", peaks, ".1f")
    differ = int((eager.losses != graphs.losses).sum())
    yield Row("losses unlike eager's", {"graphs": float(differ)}, ".0f", mark="graphs_equal")


def _steps(stage: nn.Module, x: Tensor, settings: Settings, *, has_graphs: bool) -> _Steps:
    timetable = plan("zb_h1", 1, _NUM_MICROBATCHES)
    batch = torch.cat([x * (number + 1) for number in range(_NUM_MICROBATCHES)])
    host_ms, step_ms = list[float](), list[float]()
    extras = [CudaGraphs()] if has_graphs else []
    with Pipeline({0: stage}, timetable, _mean_square, extras=extras) as pipeline:
        for _ in range(3 if settings.is_small else 6):
            stage.zero_grad(set_to_none=False)
            settings.synchronize()
            begin = time.perf_counter()
            losses = pipeline.step(batch, target=batch)
            host_ms.append(1e3 * (time.perf_counter() - begin))
            settings.synchronize()
            step_ms.append(1e3 * (time.perf_counter() - begin))
        peak = live_bytes(lambda: pipeline.step(batch, target=batch), settings.torch_device).highest
    return _Steps(median(step_ms[-3:]), median(host_ms[-3:]), peak, torch.stack(losses))


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return output.float().square().mean()

"""Part split, at its end: the same stage in a pipeline of one rank, eager and by CUDA graphs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbpp.benchmark.gpu.rows import Row
from zbpp.benchmark.gpu.settings import Settings
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.runtime.memory import live_bytes

_NUM_MICROBATCHES = 4
_TITLE = "CUDA graphs of this stage"


class _Steps(NamedTuple):
    step_ms: float  # until the device has done a step
    host_ms: float  # until `step` returns
    peak: int  # the most live bytes of a step, over those before it
    losses: Tensor
    why: str  # why nothing was replayed, or nothing


def rows(stage: nn.Module, x: Tensor, settings: Settings) -> Iterator[Row]:
    """Times and memory of a step under ZB-H1. x: of one microbatch."""
    if "cuda_graphs" not in inspect.signature(Pipeline).parameters:
        yield Row(f"{_TITLE}: not measured: this version of zbpp does not have them")
        return
    eager, graphs = (_steps(stage, x, mode, settings) for mode in ("none", "actions"))
    if graphs.why:
        yield Row(f"{_TITLE}: not measured: {graphs.why}")
        return
    found = {"eager": eager, "graphs": graphs}
    what = f"a step of {_NUM_MICROBATCHES} microbatches"
    yield Row(f"{what}, ms", {name: each.step_ms for name, each in found.items()})
    yield Row(f"{what}: host time, ms", {name: each.host_ms for name, each in found.items()})
    peaks = {name: each.peak / 2**20 for name, each in found.items()}
    yield Row(f"{what}: most live bytes, MiB", peaks, ".1f")
    differ = int((eager.losses != graphs.losses).sum())
    yield Row("losses unlike eager's", {"graphs": float(differ)}, ".0f", mark="graphs_equal")


def _steps(stage: nn.Module, x: Tensor, mode: str, settings: Settings) -> _Steps:
    options: dict[str, Any] = {"cuda_graphs": mode}
    batch = torch.cat([x * (number + 1) for number in range(_NUM_MICROBATCHES)])
    host_ms, step_ms = list[float](), list[float]()
    with Pipeline({0: stage}, plan("zb_h1", 1, _NUM_MICROBATCHES), _mean_square, **options) as pipeline:
        for _ in range(3 if settings.is_small else 6):
            stage.zero_grad(set_to_none=False)
            settings.synchronize()
            begin = time.perf_counter()
            losses = pipeline.step(batch, target=batch)
            host_ms.append(1e3 * (time.perf_counter() - begin))
            settings.synchronize()
            step_ms.append(1e3 * (time.perf_counter() - begin))
        peak = live_bytes(lambda: pipeline.step(batch, target=batch), settings.torch_device).highest
        why = _why_eager(pipeline)
    return _Steps(median(step_ms[-3:]), median(host_ms[-3:]), peak, torch.stack(losses), why)


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return output.float().square().mean()


def _why_eager(pipeline: Pipeline) -> str:
    graphs: Any = getattr(pipeline._engine, "graphs", None)
    return "they need a GPU" if graphs is None else str(graphs.stopped or "")

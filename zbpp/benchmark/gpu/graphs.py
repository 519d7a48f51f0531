"""Part graphs: steps that are replayed by CUDA graphs, beside eager ones. NOT RUN ON A GPU YET."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import mean, median
from typing import NamedTuple

import torch
from torch import Tensor

from zbpp.benchmark.gpu.rows import Row
from zbpp.benchmark.gpu.settings import Settings
from zbpp.benchmark.gpu.workload import llama, stages_of, tokens
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.runtime.graphs import CudaGraphs
from zbpp.runtime.measure import Recorder, StepRecord

_NUM_MICROBATCHES, _NUM_LAYERS, _ROWS = 8, 4, 1
_NUM_STEPS = 6  # the third one is captured


class _Run(NamedTuple):
    """losses: of all steps. gradients: of the last step."""

    losses: Tensor
    gradients: list[Tensor]
    host_us: float  # of an action
    host_ms: float  # until step() returns
    step_ms: float  # until the device has done the step
    peak_bytes: float
    num_allocations: int  # of device memory in a step


def rows(settings: Settings) -> Iterator[Row]:
    """Host time of an action and of a step, and whether losses and gradients are equal."""
    hidden = 32 if settings.is_small else 1024
    yield Row(
        f"{_NUM_LAYERS} Llama layers of hidden {hidden}, {_NUM_MICROBATCHES} microbatches of {_ROWS} row"
    )
    for schedule in ("zb_h1", "zb_v"):
        eager = _run(schedule, hidden, settings, has_graphs=False)
        found = {"eager": eager}
        if settings.left < 10:
            yield Row(f"graphs under {schedule}: no time left")
        elif not settings.is_cuda:
            yield Row(f"graphs under {schedule}: not measured: CUDA graphs need a GPU")
        else:
            found["graphs"] = captured = _run(schedule, hidden, settings, has_graphs=True)
            yield from _compared(schedule, captured, eager)
        yield from _figures(schedule, found)


def _compared(schedule: str, captured: _Run, eager: _Run) -> Iterator[Row]:
    differ = int((captured.losses != eager.losses).sum())
    yield Row(
        f"losses under graphs unlike eager's, {schedule}, of {len(eager.losses)}",
        {"graphs": float(differ)},
        ".0f",
        mark="graphs_equal",
    )
    pairs = zip(captured.gradients, eager.gradients, strict=True)
    unlike = sum(not torch.equal(one, other) for one, other in pairs)
    yield Row(f"gradients unlike eager's, of {len(eager.gradients)}", {"graphs": float(unlike)}, ".0f")
    share = captured.host_us / eager.host_us
    yield Row(f"host time per action, {schedule}, graphs / eager", {"graphs": share}, mark="graphs_host")


def _figures(schedule: str, found: dict[str, _Run]) -> Iterator[Row]:
    for what, form, values in (
        ("host time per action, us", ".1f", {name: each.host_us for name, each in found.items()}),
        ("step() returns after, ms", ".2f", {name: each.host_ms for name, each in found.items()}),
        ("a step takes, ms", ".2f", {name: each.step_ms for name, each in found.items()}),
        ("peak memory, MiB", ".0f", {name: each.peak_bytes / 2**20 for name, each in found.items()}),
        ("allocations in a step", ".0f", {name: float(each.num_allocations) for name, each in found.items()}),
    ):
        yield Row(
            f"{what}, {schedule}", {key: value for key, value in values.items() if value == value}, form
        )


def _run(schedule: str, hidden: int, settings: Settings, *, has_graphs: bool) -> _Run:
    torch.manual_seed(0)
    timetable = plan(schedule, 1, _NUM_MICROBATCHES)
    model = llama(_NUM_LAYERS, hidden, settings)
    stages = stages_of(model, timetable, settings)
    drawn = tokens(_NUM_MICROBATCHES * _ROWS, settings)
    x, target = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    if settings.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    extras = [CudaGraphs()] if has_graphs else []
    with Pipeline(stages, timetable, model.loss, extras=extras) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=1e-3)
        losses: list[Tensor] = []
        times: list[tuple[float, float]] = []
        for _ in range(_NUM_STEPS):
            optimizer.zero_grad()
            settings.synchronize()
            before, begin = _num_allocations(settings), time.perf_counter()
            losses += pipeline.step(x, target=target)
            returned, num_allocations = time.perf_counter(), _num_allocations(settings) - before
            settings.synchronize()
            times.append((returned - begin, time.perf_counter() - begin))
            optimizer.step()
        gradients = [each.grad.clone() for each in pipeline.parameters() if each.grad is not None]
        host_us = _host_us(pipeline, x, target, settings)
    peak = float(torch.cuda.max_memory_allocated()) if settings.is_cuda else float("nan")
    host_ms, step_ms = (1e3 * median(each) for each in zip(*times[3:], strict=True))
    return _Run(torch.stack(losses), gradients, host_us, host_ms, step_ms, peak, num_allocations)


def _host_us(pipeline: Pipeline, x: Tensor, target: Tensor, settings: Settings) -> float:
    """The mean time of the host for an action, by the host's clock."""
    record = StepRecord(torch.device("cpu"))
    settings.synchronize()
    with pipeline.using(Recorder(record)):
        pipeline.step(x, target=target)
    settings.synchronize()
    return 1e3 * float(mean((record.times()[:, 1] - record.times()[:, 0]).tolist()))


def _num_allocations(settings: Settings) -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"]) if settings.is_cuda else 0

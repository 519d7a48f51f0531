"""CUDA graphs of actions: host time of an action, eager and replayed; time and bytes of a graph; bits."""

from __future__ import annotations

import time
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_check.measuring import MIB, digest, gradients, unlike
from gpu_check.page import Here, Page
from gpu_check.stages import MIDDLE, SMALL, Sizes, llama_stages, token_batch, token_loss
from zbpp.features.graphs import CudaGraphs
from zbpp.observers.record import StepRecord
from zbpp.observers.recorder import Recorder
from zbpp.planning import plan
from zbpp.runtime import Pipeline

M, NUM_STEPS, CAPTURED = 4, 8, 2  # the step that is captured


class Run(NamedTuple):
    """host_us: of an action; host_ms: until step() returns; step_ms: until the device is done; medians."""

    bits: dict[str, Any]
    host_us: float
    host_ms: float
    step_ms: float
    capture_ms: float
    pool_mib: float
    num_actions: int


def run(page: Page) -> None:
    for schedule in ("zb_h1", "zb_v"):
        # Flash attention adds in its backward in any order: two eager runs would differ, too.
        with sdpa_kernel(SDPBackend.MATH):
            _compare(page, schedule)


def _compare(page: Page, schedule: str) -> None:
    """Eager and replayed steps of one schedule: their times, and whether their bits are equal."""
    eager = _row(page, schedule, "eager", "500 to 1500 us: 60 to 150 kernels of 8 us")
    if not page.here.is_cuda:
        page.skip(f"{schedule}, replayed", "graphs need a GPU")
        return
    replayed = _row(page, schedule, "replayed", "about 10 us: one launch", CudaGraphs())
    if eager is None or replayed is None:
        return
    page.check(
        f"{schedule}: losses and gradients unlike eager's",
        lambda e=eager, r=replayed: unlike(e.bits, r.bits),
    )
    page.figure(
        f"{schedule}: host time of an action, replayed / eager",
        "",
        lambda e=eager, r=replayed: r.host_us / e.host_us,
        most=None if page.here.is_small else 0.2,
    )
    page.note(
        f"{schedule}: a graph: capture and instantiation",
        "1 to 5 ms",
        lambda r=replayed: f"{r.capture_ms / r.num_actions:.2f} ms",
    )
    page.note(
        f"{schedule}: a graph: device memory",
        "the step's live bytes, shared by all graphs",
        lambda r=replayed: f"{r.pool_mib / r.num_actions:.2f} MiB",
    )


def _row(page: Page, schedule: str, what: str, predicted: str, *extras: Any) -> Run | None:
    """Run a pipeline; its host and step times."""
    found: list[Run] = []

    def measure() -> str:
        found.append(_trained(schedule, page.here, extras))
        run = found[0]
        return f"{run.host_us:.1f} us; step() returns after {run.host_ms:.2f} ms, takes {run.step_ms:.2f} ms"

    page.note(f"{schedule}, {what}: host time of an action", predicted, measure)
    return found[0] if found else None


def _trained(schedule: str, here: Here, extras: tuple[Any, ...]) -> Run:
    """Equal steps of a Llama of four layers on one rank."""
    sizes: Sizes = here.choose(MIDDLE, SMALL)
    timetable = plan(schedule, 1, M)
    stages = llama_stages(sizes, 4, range(timetable.num_stages), timetable.num_stages, here)
    x, target = token_batch(sizes, M, here)
    times = list[tuple[float, float]]()
    with Pipeline(stages, timetable, token_loss, extras=extras) as pipeline:
        for _ in range(NUM_STEPS):
            for stage in stages.values():
                stage.zero_grad(set_to_none=False)
            here.synchronize()
            begin = time.perf_counter()
            losses = pipeline.step(x, target=target)
            returned = time.perf_counter()
            here.synchronize()
            times.append((returned - begin, time.perf_counter() - begin))
        bits: dict[str, Any] = {
            f"{stage} {name}": value
            for stage, module in stages.items()
            for name, value in digest(gradients({stage: module})).items()
        }
        bits["losses"] = [each.item() for each in losses]
        record = StepRecord(torch.device("cpu"))  # the host's clock
        with pipeline.using(Recorder(record)):
            pipeline.step(x, target=target)
        here.synchronize()
        actions, pool_mib = record.times(), _pool_mib(here)
    host_ms, step_ms = (1e3 * median(each) for each in zip(*times[CAPTURED + 1 :], strict=True))
    return Run(
        bits,
        1e3 * mean((actions[:, 1] - actions[:, 0]).tolist()),
        host_ms,
        step_ms,
        1e3 * (times[CAPTURED][0] - median(each[0] for each in times[CAPTURED + 1 :])),
        pool_mib,
        len(actions),
    )


def _pool_mib(here: Here) -> float:
    """What torch's allocator has reserved for graphs: its segments in a pool that is not the usual one."""
    segments = torch.cuda.memory_snapshot() if here.is_cuda else []
    return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) != (0, 0)) / MIB

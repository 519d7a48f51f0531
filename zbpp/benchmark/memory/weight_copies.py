"""Offloaded weights measured: time per step and copies, with two buffers and with one per block.

One process on the CPU, whose copies run in turn with the computation, never beside it: so the times are those
without offload plus the copies. The steps of all cases run in turns. Predicted: F, B and W measured without
offload, with the copies of `with_weight_copies`; it is for two buffers and an upper bound.
"""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from zbpp.planning import plan
from zbpp.planning.weight_copies import with_weight_copies
from zbpp.runtime import Pipeline, Recorder, measured_costs
from zbpp.runtime.weight_offload import OffloadedWeights
from zbpp.schedule import simulate

_NUM_BLOCKS, _SIZE, _ROWS, _NUM_MICROBATCHES, _NUM_TURNS = 12, 512, 256, 4, 5


class _Case(NamedTuple):
    what: str
    pipeline: Pipeline
    weights: OffloadedWeights | None


def rows() -> list[tuple[str, str]]:
    """(what, figure) of each line."""
    timetable = plan("zb_h1", 1, _NUM_MICROBATCHES)
    cases = [_case("weights on the device", None), _case("offloaded, two buffers", 0.0)]
    cases.append(_case(f"offloaded, {_NUM_BLOCKS} buffers", float("inf")))
    x = torch.randn(_NUM_MICROBATCHES * _ROWS, _SIZE)
    times: list[list[float]] = [[] for _ in cases]
    losses: list[list[float]] = [[] for _ in cases]
    for _ in range(_NUM_TURNS + 1):
        for case, own, found in zip(cases, times, losses, strict=True):
            for parameter in case.pipeline.parameters():
                parameter.grad = None
            before = time.perf_counter()
            with case.pipeline.using(Recorder()) as recorder:
                found.extend(each.item() for each in case.pipeline.step(x, target=x))
            own.append(1e3 * (time.perf_counter() - before))
    costs = measured_costs(recorder.timeline())
    copied = with_weight_copies(
        costs, _weight_copy_ms(cases[1]), num_stages=1, num_blocks=_NUM_BLOCKS, overlaps=False
    )
    predicted = simulate(timetable, copied).makespan
    table = []
    for case, own in zip(cases, times, strict=True):
        text = f"{median(own[1:]):.1f} ms"
        if case.weights is not None:
            change = median([a / b for a, b in zip(own[1:], times[0][1:], strict=True)]) - 1
            num_copies = case.weights.num_copies // (_NUM_TURNS + 1)
            device_mb = case.weights.device_bytes / 1e6
            text += f" ({change:+.0%}), {num_copies} copies of a block, {device_mb:.1f} MB on the device"
        if case is cases[1]:
            text += f"; at most {predicted:.1f} ms predicted"
        table.append((f"step of {_NUM_BLOCKS} blocks, {case.what}", text))
    equal = all(each == losses[0] for each in losses)
    table.append(("losses equal to the last bit", "all" if equal else "NO"))
    return table


def _case(what: str, budget: float | None) -> _Case:
    torch.manual_seed(0)
    stage = nn.Sequential(*(nn.Linear(_SIZE, _SIZE) for _ in range(_NUM_BLOCKS)))
    weights = None
    if budget is not None:
        weights = OffloadedWeights({0: stage}, "cpu", budget=budget or None)
    pipeline = Pipeline({0: stage}, "zb_h1", F.mse_loss, num_microbatches=_NUM_MICROBATCHES)
    return _Case(what, pipeline, weights)


def _weight_copy_ms(case: _Case) -> float:
    """The time of copying a stage's weights once, the median of five."""
    assert case.weights is not None
    source = torch.empty(case.weights.host_bytes, dtype=torch.uint8)
    target, found = torch.empty_like(source), []
    for _ in range(5):
        before = time.perf_counter()
        target.copy_(source)
        found.append(1e3 * (time.perf_counter() - before))
    return median(found)


if __name__ == "__main__":
    for what, figure in rows():
        print(f"{what}: {figure}")

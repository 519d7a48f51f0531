"""Sections host and compute: times of F, B and W, and their ratios to plain backward's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zbpp.benchmark.interleaved_timing import without_garbage_collection
from zbpp.benchmark.split.contestants import Contestant
from zbpp.benchmark.split.report import Line
from zbpp.benchmark.split.stages import Microbatch, Settings, llama_stage, step, x_and_dy

SPREAD = "spread of the rounds"


class Times(NamedTuple):
    """Seconds of one step."""

    f: float
    b: float
    w: float


Rounds = dict[str, list[Times]]
"""For each contestant, the median times of each round."""


def timed(contestant: Contestant, stage: nn.Module, x: Tensor, dy: Tensor, device: str) -> Times:
    is_cuda = device.startswith("cuda")
    # On the CPU with one thread all work runs in this thread. Its own time does not count other processes.
    clock = time.thread_time if torch.get_num_threads() == 1 and not is_cuda else time.perf_counter
    found: list[float] = []
    for run in Microbatch(contestant, stage, x, dy).phases.values():
        begin = clock()
        run()
        if is_cuda:
            torch.cuda.synchronize()
        found.append(clock() - begin)
    return Times(*found)


def interleaved(
    contestants: Mapping[str, Contestant],
    stage: nn.Module,
    x: Tensor,
    dy: Tensor,
    *,
    rounds: int,
    steps: int,
    device: str,
) -> Rounds:
    """Each contestant's median time of a step, round by round.

    Within a round the contestants take turns, in another order each time, so that a slow moment of the
    machine hits all of them. A turn of several steps begins with one more, to warm up.
    """
    for contestant in contestants.values():
        step(contestant, stage, x, dy)
    found: Rounds = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        turn = number % len(names)
        with without_garbage_collection():
            for name in (*names[turn:], *names[:turn]):
                if steps > 1:
                    step(contestants[name], stage, x, dy)
                times = [timed(contestants[name], stage, x, dy, device) for _ in range(steps)]
                found[name].append(Times(*map(statistics.median, zip(*times, strict=True))))
    return found


def ratios(found: Rounds, part: Callable[[Times], float]) -> tuple[dict[str, float], float]:
    """Each contestant's median ratio to plain backward of the same round, and the uncertainty of zbpp's.

    The uncertainty is 1.57 IQR / sqrt(n), about half of the 95 % interval of the median (the notch of a box
    plot; IQR: upper less lower quartile).
    """
    by_round = {
        name: [part(ours) / part(plain) for ours, plain in zip(times, found["plain"], strict=True)]
        for name, times in found.items()
    }
    ours = by_round["zbpp"]
    lower, _, upper = statistics.quantiles(ours, n=4) if len(ours) > 1 else (0.0, 0.0, 0.0)
    medians = {name: statistics.median(each) for name, each in by_round.items()}
    return medians, 1.57 * (upper - lower) / len(ours) ** 0.5


def spread(found: Rounds) -> dict[str, float]:
    """The range of the middle half of the rounds, relative to their median."""
    whole = {name: [sum(times) for times in each] for name, each in found.items()}
    if len(whole["plain"]) < 2:
        return dict.fromkeys(whole, 0.0)
    quartiles = {name: statistics.quantiles(each, n=4) for name, each in whole.items()}
    return {name: (upper - lower) / middle for name, (lower, middle, upper) in quartiles.items()}


def milliseconds(found: Rounds, part: Callable[[Times], float]) -> dict[str, float]:
    return {name: 1e3 * statistics.median(map(part, times)) for name, times in found.items()}


def host(contestants: Mapping[str, Contestant], settings: Settings) -> Iterator[Line]:
    for depth in settings.depths:
        stage = llama_stage(depth, settings)
        x, dy = x_and_dy(stage, 1, 4, settings)
        steps = max(2, 64 // depth)
        found = interleaved(
            contestants, stage, x, dy, rounds=settings.rounds, steps=steps, device=settings.device
        )
        blocks = f"{depth} block{'s' if depth > 1 else ''}"
        for place, phase in enumerate("FBW"):
            values = milliseconds(found, itemgetter(place))
            yield Line(section="host", figure=f"{blocks}: {phase}, ms", values=values)
        yield Line(section="host", figure=f"{blocks}: {SPREAD}", values=spread(found), form=".0%")
        values, _ = ratios(found, lambda times: times.b + times.w)
        yield Line(section="host", figure=f"{blocks}: (B+W) / backward", values=values)
        values, _ = ratios(found, sum)
        yield Line(section="host", figure=f"{blocks}: (F+B+W) / (F+backward)", values=values, limit=1.15)


def compute(contestants: Mapping[str, Contestant], settings: Settings) -> Iterator[Line]:
    stage = llama_stage(settings.blocks, settings, settings.hidden)
    x, dy = x_and_dy(stage, settings.batch, settings.time, settings)
    found = interleaved(
        contestants, stage, x, dy, rounds=settings.compute_rounds, steps=1, device=settings.device
    )
    for place, phase in enumerate("FBW"):
        yield Line(section="compute", figure=f"{phase}, ms", values=milliseconds(found, itemgetter(place)))
    yield Line(section="compute", figure=SPREAD, values=spread(found), form=".0%")
    values, noise = ratios(found, lambda times: times.b + times.w)
    yield Line(section="compute", figure="(B+W) / backward", values=values, limit=1.0, noise=noise)

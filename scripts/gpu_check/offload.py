"""Copies to host memory and back; steps with offloaded activations, and with offloaded weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_check.measuring import MIB, ms_of
from gpu_check.page import Here, Page
from gpu_check.stages import LLAMA_1B, SMALL, Sizes, llama_stages, saved_mib, token_batch, token_loss
from zbpp.autograd.offload.host_copier import Copier
from zbpp.features.activation_offload.activation_offload import ActivationOffload
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.measure.live_tensors import live_bytes
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.schedule import Costs

M, LAYERS = 4, 4


def run(page: Page) -> None:
    bandwidth(page)
    steps(page)


def bandwidth(page: Page) -> None:
    here = page.here
    nbytes = here.choose(512 * MIB, 4 * MIB)
    copier = Copier(here.device)
    pair = copier.new_storage(nbytes), copier.host_memory(nbytes)
    floor = here.ms(host_bytes=nbytes)
    try:
        for name, copy in (("to the host", copier.out), ("back", copier.back)):
            page.figure(
                f"{nbytes // MIB} MiB {name}",
                "ms",
                lambda c=copy: ms_of(here, lambda: c([pair]).wait()),
                floor=floor,
                why="bytes",
            )
    finally:
        copier.close()


class Run(NamedTuple):
    """losses: of the last step; ms: a step; mib: the most live bytes of a step, over those before it."""

    losses: Tensor
    ms: float
    mib: float


def steps(page: Page) -> None:
    """gpipe on one rank: it holds all microbatches between F and B."""
    here = page.here
    page.say("gpipe on one rank, four layers, four microbatches")
    costs, least = Costs(f=2, b=2, w=2, host=0.1), here.choose(2**20, 1)
    kinds: dict[str, Callable[[], Run]] = {
        "nothing": cache(lambda: _trained(here)),
        "activations": cache(lambda: _trained(here, ActivationOffload(costs=costs, least_bytes=least))),
        "weights": cache(lambda: _trained(here, weights=True)),
    }
    sizes = _sizes(here)
    flops = M * sum(sizes.flops(LAYERS).values())
    # Each microbatch brings the weights for F and for B, and moves a block's gradients there and back.
    moved = {"weights": M * 4 * 2.0 * LAYERS * sizes.layer_weights}
    for name, trained in kinds.items():
        what, floor = f"offloaded: {name}", here.ms(flops=flops, host_bytes=moved.get(name, 0.0))
        page.figure(f"{what}: a step", "ms", lambda t=trained: t().ms, floor=floor, why="operations, bytes")
        held = M * saved_mib(sizes, LAYERS) if name != "activations" else None
        why = "saved tensors, about" if held else "less than without"
        page.figure(f"{what}: most live bytes", "MiB", lambda t=trained: t().mib, floor=held, why=why)
        if name != "nothing":
            page.check(
                f"offloaded: {name}: losses unlike without",
                lambda t=trained: int((t().losses != kinds["nothing"]().losses).sum()),
            )


def _sizes(here: Here) -> Sizes:
    return here.choose(LLAMA_1B._replace(vocab=256, tokens=2048), SMALL)


def _trained(here: Here, *extras: Any, weights: bool = False) -> Run:
    sizes = _sizes(here)
    stages = llama_stages(sizes, LAYERS, [0], 1, here)
    x, target = token_batch(sizes, M, here)
    if weights:
        OffloadedWeights(stages, here.device)
    times = []
    with Pipeline(stages, plan("gpipe", 1, M), token_loss, extras=extras) as pipeline:
        for _ in range(here.choose(5, 2)):
            here.synchronize()
            begin = time.perf_counter()
            losses = pipeline.step(x, target=target)
            here.synchronize()
            times.append(time.perf_counter() - begin)
        peak = live_bytes(lambda: pipeline.step(x, target=target), here.device).highest
    return Run(torch.stack(losses), 1e3 * median(times[1:]), peak / MIB)

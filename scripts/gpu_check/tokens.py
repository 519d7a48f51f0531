"""Tokens per second of a Llama of 1e9 weights: plain torch, 1F1B on one rank, zb_h1 on two ranks of one GPU.

Two ranks share the GPU, so no speed is to be gained: the figure shows what messages through host memory, and
kernels of two processes that take turns, cost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from gpu_check.local_ranks import on_ranks
from gpu_check.page import Here, Page
from gpu_check.stages import LLAMA_1B, SMALL, Sizes, llama_stages, token_batch, token_loss
from zbpp.planning import plan
from zbpp.runtime import Pipeline

M, NUM_STEPS = 8, 4


def run(page: Page) -> None:
    here = page.here
    sizes, layers = _sizes(here)
    flops = sum(sizes.flops(layers).values()) + 6.0 * sizes.hidden * sizes.vocab * sizes.tokens
    weights = layers * sizes.layer_weights + 2 * sizes.hidden * sizes.vocab
    page.say(f"{weights:.3g} weights, {M} microbatches of {sizes.tokens} tokens, no optimizer")
    fastest = here.rates.flops / flops * sizes.tokens
    why = f"{flops / sizes.tokens:.3g} operations per token"
    plain = page.figure("plain torch", "tokens/s", lambda: _plain(here), floor=fastest, why=why)
    page.figure("1f1b, one rank", "tokens/s", lambda: next(_on_rank(0, here, "1f1b", 1)), floor=plain)
    page.figure("zb_h1, one rank", "tokens/s", lambda: next(_on_rank(0, here, "zb_h1", 1)), floor=plain)
    if here.is_cuda:
        torch.cuda.empty_cache()
    page.figure(
        "zb_h1, two ranks",
        "tokens/s",
        lambda: min(next(on_ranks(2, _on_rank, here, "zb_h1", 2))),
        floor=plain,
    )


def _sizes(here: Here) -> tuple[Sizes, int]:
    return here.choose((LLAMA_1B, 16), (SMALL, 2))


def _per_second(here: Here, step: Any) -> float:
    times = []
    for _ in range(here.choose(NUM_STEPS, 2)):
        here.synchronize()
        begin = time.perf_counter()
        step()
        here.synchronize()
        times.append(time.perf_counter() - begin)
    return M * _sizes(here)[0].tokens / median(times[1:])


def _plain(here: Here) -> float:
    sizes, layers = _sizes(here)
    module = llama_stages(sizes, layers, [0], 1, here)[0]
    x, target = token_batch(sizes, M, here)

    def step() -> None:
        for inputs, targets in zip(x.chunk(M), target.chunk(M), strict=True):
            (token_loss(module(inputs), targets) / M).backward()

    return _per_second(here, step)


def _on_rank(rank: int, here: Here, schedule: str, num_ranks: int) -> Iterator[float]:
    sizes, layers = _sizes(here)
    timetable = plan(schedule, num_ranks, M)
    stages = llama_stages(sizes, layers, timetable.stages_of(rank), timetable.num_stages, here)
    x, target = token_batch(sizes, M, here)
    args = (x,) if 0 in stages else ()
    given = {"target": target} if timetable.num_stages - 1 in stages else {}
    with Pipeline(stages, timetable, token_loss) as pipeline:
        found = _per_second(here, lambda: pipeline.step(*args, **given))
    yield found

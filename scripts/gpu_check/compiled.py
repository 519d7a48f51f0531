"""A compiled layer: time to compile, F, B and W beside the eager layer, and how exact its gradients are."""

from __future__ import annotations

import copy
import time
from functools import cache

import bench_split
import torch
from torch import Tensor, nn

from gpu_check.measuring import error_of, phases_ms
from gpu_check.page import Page
from gpu_check.stages import LLAMA_8B, SMALL, Sizes, blocks, stage_of, x_and_dy

M = 8


def run(page: Page) -> None:
    here = page.here
    sizes: Sizes = here.choose(LLAMA_8B, SMALL)
    backend = here.compiler
    stage = stage_of(blocks(sizes, 1, here), main_grad=True)
    x, dy = x_and_dy(sizes, here)
    compiled, eager = bench_split.Compiled(backend), bench_split.Zbpp()

    def first() -> float:
        begin = time.perf_counter()
        bench_split.run_step(compiled, stage, x, dy)
        here.synchronize()
        return time.perf_counter() - begin

    page.figure(f"first microbatch, with {backend}", "s", first, why="10 to 60 s with Inductor")
    flops = sizes.flops(1)
    for name, column in (("eager", eager), ("compiled", compiled)):
        measured = cache(lambda c=column: phases_ms(here, bench_split.phases(c, stage, x, dy)))
        for phase, number in flops.items():
            page.figure(
                f"{name}: {phase}",
                "ms",
                lambda p=phase, m=measured: m()[p],
                floor=here.ms(flops=number),
                why=f"{number:.3g} operations",
            )
    page.say(f"one linear layer after {M} microbatches: error of main_grad against float64")
    layer = nn.Linear(sizes.hidden, sizes.hidden, bias=False, device=here.device, dtype=here.dtype)
    why = "1e-7 to 1e-5: sums in float32"
    eager_error = page.figure("eager", "", lambda: _error(eager, layer, sizes, x), why=why)
    most = None if here.is_small else 1.05 * eager_error
    page.figure(
        "compiled",
        "",
        lambda: _error(bench_split.Compiled(backend), layer, sizes, x),
        floor=eager_error,
        why="as eager",
        most=most,
    )


def _error(column: bench_split.Column, layer: nn.Module, sizes: Sizes, like: Tensor) -> float:
    """The error of a weight's gradient, summed in float32 over microbatches."""
    own = copy.deepcopy(layer)
    stage = stage_of([own], main_grad=True)
    generator = torch.Generator(like.device).manual_seed(1)
    exact = torch.zeros_like(own.weight, dtype=torch.float64)
    for _ in range(M):
        x, dy = torch.randn(
            (2, 1, 256, sizes.hidden), generator=generator, device=like.device, dtype=like.dtype
        ).unbind()
        bench_split.run_step(column, stage, x, dy)
        exact += dy[0].double().T @ x[0].double()
    return error_of(own.weight.main_grad, exact)

"""F, B and W of one layer and of five of Llama-3-8B, with and without main_grad; W's product by variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import bench_split
import torch
from torch import Tensor

from gpu_check.measuring import error_of, ms_of, peak_mib, phases_ms
from gpu_check.page import ROUNDED, Page, first_line
from gpu_check.stages import LLAMA_8B, SMALL, Sizes, blocks, saved_mib, stage_of, x_and_dy
from zbpp.autograd.adding import add_product


def run(page: Page) -> None:
    here = page.here
    sizes: Sizes = here.choose(LLAMA_8B, SMALL)
    products(page, sizes)
    for layers in (1, 5):
        for main_grad in (False, True):
            _stage(page, sizes, layers, main_grad=main_grad)
            if here.is_cuda:
                torch.cuda.empty_cache()


def _stage(page: Page, sizes: Sizes, layers: int, *, main_grad: bool) -> None:
    here = page.here
    has_main = ", gradients in a float32 main_grad" if main_grad else ""
    page.say(f"{layers} layer(s), {sizes.tokens} tokens{has_main}")
    stage = stage_of(blocks(sizes, layers, here), main_grad=main_grad)
    x, dy = x_and_dy(sizes, here)
    columns: dict[str, bench_split.Column] = {"plain": bench_split.Plain(), "zbpp": bench_split.Zbpp()}
    if main_grad:
        del columns["plain"]  # torch knows no main_grad
    else:
        try:
            columns["torch"] = bench_split.Torch()
            bench_split.run_step(columns["torch"], stage, x, dy)
        except Exception as error:  # a private function of torch may raise anything
            columns.pop("torch", None)
            page.skip("torch's split", first_line(error))
    flops = sizes.flops(layers)
    for name, column in columns.items():
        measured = cache(lambda c=column: phases_ms(here, bench_split.phases(c, stage, x, dy)))
        _phases(page, f"{layers} layer(s), {name}", measured, flops, is_whole=name == "plain")
        peak = cache(lambda c=column: peak_mib(here, lambda: bench_split.run_step(c, stage, x, dy)))
        page.figure(
            f"{layers} layer(s), {name}: most live bytes of a microbatch",
            "MiB",
            peak,
            floor=saved_mib(sizes, layers),
            why="saved tensors, about",
        )


def _phases(
    page: Page,
    what: str,
    measured: Callable[[], Mapping[str, float]],
    flops: Mapping[str, float],
    *,
    is_whole: bool,
) -> None:
    """Rows of F, B and W, and of the operations per second."""
    here = page.here
    if is_whole:  # plain backward's W is empty
        flops = {"F": flops["F"], "B": flops["B"] + flops["W"]}
    for phase, number in flops.items():
        name = "backward" if is_whole and phase == "B" else phase
        why = f"{number:.3g} operations"
        page.figure(
            f"{what}: {name}", "ms", lambda p=phase: measured()[p], floor=here.ms(flops=number), why=why
        )
    peak = here.rates.flops / 1e12
    whole = sum(flops.values())
    page.figure(
        f"{what}: all", "TFLOP/s", lambda: whole / sum(measured().values()) / 1e9, floor=peak, why="the peak"
    )


# ---- W's product by itself: target += left @ right, for the largest matrix of a layer

Product = Callable[[Tensor, Tensor, Tensor], Any]


def products(page: Page, sizes: Sizes) -> None:
    """Time, peak and error of each way to add a product to a gradient."""
    here = page.here
    page.say(f"W's product: [{sizes.hidden}, {sizes.tokens}] @ [{sizes.tokens}, {sizes.intermediate}]")
    generator = torch.Generator(here.device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=here.device, dtype=here.dtype)

    left, right = drawn(sizes.tokens, sizes.hidden).T, drawn(sizes.tokens, sizes.intermediate)
    flops = 2.0 * sizes.hidden * sizes.tokens * sizes.intermediate
    num = sizes.hidden * sizes.intermediate
    exact = None if here.is_cuda and not here.is_small else left.double() @ right.double()
    if exact is None:  # some rows: the whole in float64 takes a second
        exact = left[:64].double() @ right.double()
    for name, (dtype, product) in VARIANTS.items():
        target = torch.zeros(sizes.hidden, sizes.intermediate, device=here.device, dtype=dtype)
        # The target is read and written.
        floor = here.ms(flops=flops, nbytes=2 * num * dtype.itemsize + 2 * (left.numel() + right.numel()))
        add = lambda t=target, p=product: p(t, left, right)  # noqa: E731
        why = f"{flops:.3g} operations"
        try:
            add()
        except (NotImplementedError, RuntimeError, TypeError) as error:
            page.skip(name, f"not with this torch and device: {first_line(error)}")
            continue
        page.figure(name, "ms", lambda a=add: ms_of(here, a), floor=floor, why=why)
        page.figure(f"{name}: most live bytes", "MiB", lambda a=add: peak_mib(here, a), floor=0, why="none")

        def error(t: Tensor = target, a: Callable[[], Any] = add) -> float:
            t.zero_()
            a()
            return error_of(t[: len(exact)], exact)

        rounded, kept = f"{ROUNDED:.4g}: rounded to bfloat16 once", "1e-7 to 1e-5: sums in float32"
        is_rounded = dtype == torch.bfloat16 or "in bfloat16" in name
        page.figure(f"{name}: error", "", error, why=rounded if is_rounded else kept)


def _widened(target: Tensor, left: Tensor, right: Tensor) -> None:
    target.add_(torch.mm(left, right, out_dtype=torch.float32))


def _fused(target: Tensor, left: Tensor, right: Tensor) -> None:
    torch.addmm(target, left, right, out_dtype=torch.float32, out=target)


VARIANTS: dict[str, tuple[torch.dtype, Product]] = {
    "into bfloat16, zbpp": (torch.bfloat16, lambda t, a, b: add_product(t, a, b, False)),
    "into float32, zbpp": (torch.float32, lambda t, a, b: add_product(t, a, b, False)),
    "into float32: mm in bfloat16, then add": (torch.float32, lambda t, a, b: t.add_(a @ b)),
    "into float32: mm with out_dtype, then add": (torch.float32, _widened),
    "into float32: addmm with out_dtype, in place": (torch.float32, _fused),
}

#!/usr/bin/env python
"""A language model's head and its loss: torch's linear and cross_entropy beside the forms that save memory.

    python scripts/bench_head.py                     # both sections, on the CPU: about four minutes
    python scripts/bench_head.py head --dtype bfloat16

    head      one head alone: the bytes held after F and after B, the most in F, B and W, and time ratios
    pipeline  a small Llama with 32k words on two ranks, zb_h1: the last rank's live bytes, tokens per second

Forms: plain (linear, then cross_entropy in float32), logits kept, logits kept with the head's W at once,
logits again (keep_logits=False), fused (torch.nn.functional.linear_cross_entropy in chunks). The forms take
turns; a ratio is the median of each round's own ratio to plain. With 16 bits the gradients are summed in a
main_grad.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zbpp.autograd import backward_input, linear_cross_entropy
from zbpp.features.head_at_once.head_at_once import HeadAtOnce
from zbpp.job.agreement import gather
from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.measure.live_tensors import LiveTensors
from zbpp.models.llama import Llama
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.training.measured_steps import machine

MIB = 2**20
ROWS, TIME = 2, 256  # of a microbatch of the pipeline
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x [T, H], weight, target) -> scalar


def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def ours(x: Tensor, weight: Tensor, target: Tensor, *, keep_logits: bool) -> Tensor:
    return linear_cross_entropy(x, weight, target, keep_logits=keep_logits).mean()


def fused(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.linear_cross_entropy(x, weight, target, options=nn.LinearCrossEntropyOptions())


FORMS: dict[str, Loss] = {
    "plain": plain,
    "logits kept": partial(ours, keep_logits=True),
    "logits again": partial(ours, keep_logits=False),
}
if hasattr(F, "linear_cross_entropy"):
    FORMS["fused (torch)"] = fused


# ---- One head


def head(options: argparse.Namespace) -> None:
    tokens, hidden, words, dtype = options.tokens, options.hidden, options.words, options.dtype
    print(f"\nhead: {tokens} tokens, hidden {hidden}, {words} words, {dtype}")
    weight = torch.randn(words, hidden, dtype=dtype).div_(hidden**0.5).requires_grad_()
    if dtype.itemsize < 4:
        weight.main_grad = torch.zeros(words, hidden)  # type: ignore[attr-defined]
    weight.grad = torch.zeros(words, hidden, dtype=dtype)
    x, target = torch.randn(tokens, hidden, dtype=dtype), torch.randint(words, (tokens,))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in FORMS}
    for turn in range(options.rounds + 1):
        for name, loss in FORMS.items():
            found = timed(loss, x, weight, target)
            if turn:  # the first one warms up
                times[name].append(found)
    print(f"{'':16}{'after F':>9}{'after B':>9}{'most':>9}  MiB{'F+B+W':>9}{'F+B':>7}")
    for name, loss in FORMS.items():
        levels = "".join(f"{level / MIB:9.1f}" for level in held(loss, x, weight, target))
        pairs = [zip(*both, strict=True) for both in zip(times[name], times["plain"], strict=True)]
        whole, to_b = (median(ratios) for ratios in zip(*([a / b for a, b in p] for p in pairs), strict=True))
        print(f"{name:16}{levels}     {whole:9.2f}{to_b:7.2f}")


def timed(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> tuple[float, float]:
    """Seconds of F, B and W; of F and B."""
    x = x.detach().requires_grad_()
    start = time.perf_counter()
    _, weight_grads = backward_input(loss(x, weight, target), None, x)
    after_b = time.perf_counter()
    weight_grads.accumulate()
    return time.perf_counter() - start, after_b - start


def held(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> list[int]:
    """Bytes after F and after B, without x, and the most."""
    x = x.detach().requires_grad_()
    with LiveTensors() as live:
        value = loss(x, weight, target)
        after_f = live.now
        dx, weight_grads = backward_input(value, None, x)
        del value, dx
        after_b = live.now
        weight_grads.accumulate()
    return [after_f, after_b, live.highest]


# ---- A pipeline


class WithoutHead(nn.Module):
    """A last stage that returns hidden states; the loss multiplies them by the head."""

    def __init__(self, stage: nn.Sequential) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        for name, part in self.stage.named_children():
            x = part(x) if name != "head" else x
        return x


def pipeline_of(rank: int, name: str, options: argparse.Namespace) -> Pipeline:
    sizes = {"num_layers": 8, "hidden_size": options.hidden // 2, "num_heads": 4, "sequence_length": TIME}
    model = Llama(vocab_size=options.words, **sizes)
    stage: Any = model.build_stage(rank, 2).to(options.dtype)
    timetable, loss = plan("zb_h1", 2, options.microbatches), model.loss
    extras = [HeadAtOnce()] if name == "kept, W at once" else []
    if rank == 1 and name not in ("logits kept", "kept, W at once"):
        form, stage = FORMS[name], WithoutHead(stage)

        def loss(hidden: Tensor, target: Tensor) -> Tensor:
            return form(hidden.flatten(0, 1), stage.stage.head.weight, target.flatten())

    return Pipeline({rank: stage}, timetable, loss, extras=extras)


def pipeline(options: argparse.Namespace) -> str:
    """What each rank does; the table, from the last rank."""
    with world(device="cpu") as here:
        names = ["plain", "logits kept", "kept, W at once", *list(FORMS)[2:]]
        pipelines = {name: pipeline_of(here.rank, name, options) for name in names}
        tokens = torch.randint(options.words, (ROWS * options.microbatches, TIME + 1))
        args, target = (tokens[:, :-1],) if here.rank == 0 else (), tokens[:, 1:] if here.rank else None
        seconds: dict[str, list[float]] = {name: [] for name in names}
        highest = {}
        for turn in range(options.rounds + 1):
            for name, each in pipelines.items():
                dist.barrier()
                start = time.perf_counter()
                each.step(*args, target=target)
                dist.barrier()
                if turn:  # the first step makes the gradients
                    seconds[name].append(time.perf_counter() - start)
        for name, each in pipelines.items():
            with LiveTensors() as live:
                each.step(*args, target=target)
            highest[name] = live.highest
            each.close()
        lines = [f"{'':17}{'live MiB, last rank':>20}{'tokens/s':>10}{'ratio':>7}"]
        for name in names:
            ratio = median(a / b for a, b in zip(seconds["plain"], seconds[name], strict=True))
            speed = ROWS * options.microbatches * TIME / median(seconds[name])
            lines.append(f"{name:17}{highest[name] / MIB:20.1f}{speed:10.0f}{ratio:7.2f}")
        return str(gather("\n".join(lines))[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("section", nargs="?", choices=["head", "pipeline", "all"], default="all")
    parser.add_argument("--dtype", default="float32")
    for name, number in (("tokens", 2048), ("hidden", 512), ("words", 32000), ("microbatches", 8)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.dtype = getattr(torch, options.dtype)
    torch.set_num_threads(1)
    print(machine(torch.device("cpu")), f"load {os.getloadavg()[0]:.1f}")
    if options.section != "pipeline":
        head(options)
    if options.section != "head":
        print(
            f"\npipeline: 2 ranks, zb_h1, m = {options.microbatches}, {options.words} words, {options.dtype}"
        )
        print(on_ranks(2, pipeline, options))


if __name__ == "__main__":
    main()

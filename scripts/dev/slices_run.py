#!/usr/bin/env python
"""Sequences in slices on this machine, beside whole ones: a small Llama, and emulated stages.

    python scripts/dev/slices_run.py real                       Llama, 8192 tokens, 2 ranks, S = 1 and 4
    python scripts/dev/slices_run.py emulated                   128k tokens' costs, 4 ranks, S = 1 and 8
    python scripts/dev/slices_run.py real --tokens 256 --repeats 1      to see that it runs

real: tokens per second of a step (the median of `repeats`), and the most bytes of live tensors on each rank,
counted in a step of its own.
emulated: stages sleep for the times that Llama-3-8B's layers take in proportion at 128k tokens: attention is
three quarters of F. Measured and predicted makespan of a step.
Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.measure.live_tensors import live_bytes
from zbpp.models.emulated import SlowBackward, sleep
from zbpp.models.llama import Llama
from zbpp.observers.recorder import Recorder
from zbpp.planning import balanced_bounds, plan
from zbpp.runtime import Pipeline
from zbpp.schedule import Costs, simulate
from zbpp.stage_api import mean_over

M = 8  # microbatches

# ---------------------------------------------------------------- a real model


def _real(given: tuple[str, int, int, list[int]]) -> list[Any]:
    """For each number of slices (tokens per second, idle share of a step, live bytes of each rank)."""
    schedule, tokens, repeats, slices = given
    model = Llama(
        vocab_size=512, num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=2, sequence_length=tokens
    )
    # A token takes 12 x 128 x 128 products in a layer, and 2 x 128 for each token that it sees: half of them.
    costs = Costs(f=12 * 128, b=12 * 128, w=12 * 128, quadratic=Costs(f=tokens, b=2 * tokens, w=0.0))
    ids = torch.randint(512, (M, tokens + 1), generator=torch.Generator().manual_seed(0))
    batch = ids[:, :-1], ids[:, 1:]
    found = []
    for number in slices:
        bounds = balanced_bounds(number, tokens, costs) if number > 1 else []
        timetable = plan(schedule, 2, M, num_slices=number)
        with Pipeline(model, timetable, slice_bounds=bounds) as pipeline:
            pipeline.step(batch[0], target=batch[1])
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                pipeline.step(batch[0], target=batch[1])
                times.append(time.perf_counter() - begin)
            with pipeline.using(Recorder()) as recorder:
                pipeline.step(batch[0], target=batch[1])
                idle = recorder.timeline().bubble_rate
            level = live_bytes(
                lambda pipeline=pipeline: pipeline.step(batch[0], target=batch[1]), pipeline.device
            )
            levels = pipeline.place.gather(level.highest)
        found.append((M * tokens / median(times), idle, levels))
    return found


# ---------------------------------------------------------------- emulated stages


class Sleeping(nn.Module):
    """Sleeps in F, B and W for the time of the slice. times: ms of each, (linear part, quadratic part)."""

    def __init__(self, times: dict[str, tuple[float, float]], tokens: int) -> None:
        super().__init__()
        self.times, self.tokens = times, tokens
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.weight.register_hook(lambda grad: sleep(self.units_of_w.pop(0)))
        self.units_of_w: list[float] = []

    def forward(self, x: Tensor, sequence_slice: Any = None) -> Tensor:
        start, end = (
            (0, self.tokens) if sequence_slice is None else (sequence_slice.start, sequence_slice.end)
        )
        a, b = start / self.tokens, end / self.tokens
        f, in_b, w = (linear * (b - a) + squared * (b * b - a * a) for linear, squared in self.times.values())
        # W's ascend in microbatch and descend in slice.
        index = 0 if sequence_slice is None else sequence_slice.index
        self.units_of_w.insert(len(self.units_of_w) - index, w)
        sleep(f)
        y: Tensor = SlowBackward.apply(nn.functional.linear(x, self.weight), in_b)  # type: ignore[no-untyped-call]
        return y


def _emulated(given: tuple[str, int, list[int], float]) -> list[Any]:
    """For each number of slices (measured ms, predicted ms)."""
    schedule, num_ranks, slices, ms = given
    # At 128k tokens attention is three quarters of F; its B takes twice as long, and it has no W.
    costs = Costs(f=ms / 4, b=ms / 4, w=ms / 4, quadratic=Costs(f=3 * ms / 4, b=3 * ms / 2, w=0.0))
    tokens, found = 1024, []
    for number in slices:
        timetable = plan(schedule, num_ranks, M, num_slices=number)
        per_rank = timetable.num_stages // num_ranks
        bounds = balanced_bounds(number, tokens, costs) if number > 1 else []
        own = {
            op: (getattr(costs, op) / per_rank, getattr(costs.quadratic, op) / per_rank)
            for op in ("f", "b", "w")
        }
        rank = torch.distributed.get_rank()
        stages = {stage: Sleeping(own, tokens) for stage in timetable.stages_of(rank)}
        x = torch.zeros(M, tokens, 4)
        with Pipeline(stages, timetable, _loss, slice_bounds=bounds) as pipeline:
            pipeline.step(x, target=x)
            with pipeline.using(Recorder()) as recorder:
                pipeline.step(x, target=x)
                measured = recorder.timeline().makespan
        spread = Costs(
            **{op: linear for op, (linear, _) in own.items()},
            quadratic=Costs(**{op: squared for op, (_, squared) in own.items()}),
        )
        predicted = simulate(timetable, spread.sliced(bounds) if bounds else spread).makespan
        found.append((measured, predicted))
    return found


def real(given: Any) -> list[Any]:
    with world(device="cpu"):
        return _real(given)


def emulated(given: Any) -> list[Any]:
    with world(device="cpu"):
        return _emulated(given)


@mean_over(lambda target: target[..., 0].numel())
def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["real", "emulated"])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1", "zb_v"])
    parser.add_argument("--tokens", type=int, default=8192, help="of a sequence of the real model")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of the real model")
    parser.add_argument("--ranks", type=int, default=4, help="of the emulated stages")
    parser.add_argument("--ms", type=float, default=800.0, help="F of a sequence on a rank, emulated")
    given = parser.parse_args()
    for schedule in given.schedules:
        if given.what == "real":
            found = on_ranks(2, real, (schedule, given.tokens, given.repeats, [1, 4]))
            for number, (speed, idle, levels) in zip([1, 4], found, strict=True):
                mib = ", ".join(f"{level / 2**20:.1f}" for level in levels)
                print(
                    f"{schedule:6} S={number}: {speed:.0f} tokens/s, idle {100 * idle:.1f} %, "
                    f"live MiB by rank {mib}",
                    flush=True,
                )
        else:
            found = on_ranks(given.ranks, emulated, (schedule, given.ranks, [1, 8], given.ms))
            for number, (took, predicted) in zip([1, 8], found, strict=True):
                print(
                    f"{schedule:6} S={number}: {took:.0f} ms, predicted {predicted:.0f} "
                    f"({took / predicted:.3f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Unequal microbatches on EMULATED stages: measured steps beside predicted ones, as given and ordered.

    python scripts/dev/lengths_emulated.py           4 ranks, 16 microbatches, cv .6, draws 0 and 1

The lengths and costs are those of lengths_eval.py. A stage sleeps as long as its costs say for the length of
what it is given, so more ranks than cores run at the same time. All pipelines of a draw run in turn, in the
same processes; a figure is the median. Run it on a machine that does nothing else: `measured / predicted`
should be at most 1.05, and `gain` at least that of scripts/results/lengths.txt. An action costs this machine
about 1 ms besides its sleep (wake-up, message, autograd), which the prediction does not hold: with --ms 10,
where an action of ZB-V sleeps 5 ms, that is a tenth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lengths_eval import costs_of, lengths_of

from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.models.emulated import SlowBackward, sleep
from zbpp.planning import order_microbatches, plan
from zbpp.runtime import Pipeline, per_microbatch
from zbpp.schedule import Costs, Op, Timetable, simulate

NAMES = ("1f1b", "zb_h1", "zb_v")
UNIT = 100  # tokens of a microbatch of length 1


class SlowWeight(torch.autograd.Function):
    """The identity of a weight, whose gradient takes some milliseconds."""

    @staticmethod
    def forward(ctx, weight: Tensor, milliseconds: float) -> Tensor:
        ctx.milliseconds = milliseconds
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        sleep(ctx.milliseconds)
        return grad, None


class Sleeping(nn.Module):
    """A linear layer that sleeps as long as F, B and W of this stage take for the length of its input."""

    def __init__(self, costs: Costs, stage: int, num_stages: int) -> None:
        super().__init__()
        self.costs, self.stage, self.num_stages = costs, stage, num_stages
        self._times: dict[int, list[float]] = {}  # by length, of F, B and W
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self._times:
            times = self.costs.of_length(x.shape[1] / UNIT).per_stage(self.num_stages).duration
            self._times[x.shape[1]] = [times[op][self.stage] for op in (Op.F, Op.B, Op.W)]
        f, b, w = self._times[x.shape[1]]
        sleep(f)
        return SlowBackward.apply(F.linear(x, SlowWeight.apply(self.weight, w)), b)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def quantized(num_microbatches: int, cv: float, draw: int) -> list[float]:
    return [max(1, round(UNIT * each)) / UNIT for each in lengths_of(num_microbatches, cv, draw)]


def stage_of(rank: int, timetable: Timetable, costs: Costs) -> dict[int, nn.Module]:
    return {s: Sleeping(costs, s, timetable.num_stages) for s in timetable.stages_of(rank)}


def run(given: tuple[argparse.Namespace, int]) -> None:
    with world(device="cpu") as here:
        measure(here.rank, *given)


def measure(rank: int, options: argparse.Namespace, draw: int) -> None:
    """Run all schedules in both orders; rank 0 prints a line for each schedule."""
    lengths = quantized(options.microbatches, options.cv, draw)
    x = [torch.ones(1, round(UNIT * each), 4) for each in lengths]
    steps, predicted, pipelines = {}, {}, []
    for name in NAMES:
        timetable = plan(name, options.ranks, options.microbatches)
        costs = costs_of(timetable, lengths, options.ms)
        pipeline = Pipeline(stage_of(rank, timetable, costs), timetable, loss)
        pipelines.append(pipeline)
        # Each rank would search as far as its own clock lets it: rank 0's order counts.
        orders = [None, pipeline.place.broadcast(order_microbatches(timetable, costs))]
        for what, order in zip(("given", "ordered"), orders, strict=True):
            chosen = order or range(options.microbatches)
            predicted[name, what] = simulate(timetable, costs.reordered([*chosen])).makespan
            steps[name, what] = partial(pipeline.step, per_microbatch(x, order), target=per_microbatch(x))
    times: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for repetition in range(options.steps + 2):
        for key, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            if repetition > 1:
                times[key].append(1000 * (time.perf_counter() - start))
    if rank == 0:
        for name in NAMES:
            medians = {what: statistics.median(times[name, what]) for what in ("given", "ordered")}
            report(f"draw {draw} {name:6s}", medians, {what: predicted[name, what] for what in medians})
    for pipeline in pipelines:
        pipeline.close()


def report(what: str, measured: dict[str, float], predicted: dict[str, float]) -> None:
    columns = [
        f"{order} {took:4.0f} ms, predicted {predicted[order]:4.0f} ({took / predicted[order]:.3f})"
        for order, took in measured.items()
    ]
    gain, expected = (each["given"] / each["ordered"] for each in (measured, predicted))
    print(f"{what} {'; '.join(columns)}; gain {gain:.3f}, predicted {expected:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--cv", type=float, default=0.6)
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ms", type=float, default=40.0, help="F of a mean microbatch on a rank")
    options = parser.parse_args()
    print(f"EMULATED stages, {options.ranks} ranks, {options.microbatches} microbatches, cv {options.cv:g}")
    for draw in range(options.draws):
        on_ranks(options.ranks, run, (options, draw))


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Host time of the split on tensor-parallel layers: F + B + W beside DTensor's own forward and backward.

    python scripts/dev/bench_tensor.py                     # one process, then two (gloo)
    python scripts/dev/bench_tensor.py --ranks 1 --layers 8 --repeats 200

A stage of Llama blocks, so small that nearly all time is the host's. The two run in turns, and so does the
stage without tensor parallelism; figures are medians of the CPU time of the thread. ratio: split / plain.
The target is at most 1.15.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from zbpp.autograd import backward_input
from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.models.llama import Llama

NUM_WARM_UPS, TARGET, HIDDEN_SIZE, TIME = 5, 1.15, 16, 4
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes, a job for each")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    print(
        f"milliseconds of CPU per microbatch, {options.layers} Llama blocks, {options.repeats} repeats, "
        f"torch {torch.__version__}; load average {os.getloadavg()[0]:.1f}"
    )
    print(f"{'ranks stage':<26}{'plain':>8}{'F':>8}{'B':>8}{'W':>8}{'F+B+W':>8}{'ratio':>8}")
    for num_ranks in options.ranks:
        rows: list[tuple[str, Figures]] = on_ranks(num_ranks, measure, (options.layers, options.repeats))
        for name, figures in rows:
            print(line(num_ranks, name, figures))


def line(num_ranks: int, name: str, figures: Figures) -> str:
    remark = "  MISSED" if name != "whole" and figures["ratio"] > TARGET else ""
    cells = [f"{figures[what]:>8.2f}" for what in ("plain", "F", "B", "W", "split", "ratio")]
    return f"{num_ranks:<6}{name:<20}{''.join(cells)}{remark}"


def measure(job: tuple[int, int]) -> list[tuple[str, Figures]]:
    """What each rank does with (layers, repeats)."""
    num_layers, repeats = job
    with world(device="cpu") as here:
        mesh = init_device_mesh("cpu", (here.size,), mesh_dim_names=("tensor",))
        stages: dict[str, nn.Module] = {}
        for name in ("whole", "tensor", "sequence"):
            model = Llama(
                num_layers=num_layers + 2,
                hidden_size=HIDDEN_SIZE,
                num_heads=2,
                sequence_length=TIME,
                layers_per_stage=(1, num_layers, 1),
                sequence_parallel=name == "sequence",
            )
            stages[name] = model.build_stage(1, 3)
            if name != "whole":
                model.parallelize(stages[name], mesh)
        samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in stages}
        for repeat in range(-NUM_WARM_UPS, repeats):
            for name, stage in stages.items():
                sample = (timed(lambda s=stage: plain(s)), *split(stage))
                if repeat >= 0:
                    samples[name].append(sample)
        return [(name, figures_of(rows)) for name, rows in samples.items()]


def figures_of(rows: list[tuple[float, ...]]) -> Figures:
    columns = [median(column) * 1e3 for column in zip(*rows, strict=True)]
    figures = dict(zip(("plain", "F", "B", "W"), columns, strict=True))
    together = median(sum(row[1:]) for row in rows) * 1e3
    ratio = median(sum(row[1:]) / row[0] for row in rows)
    return figures | {"split": together, "ratio": ratio}


def timed(function: Callable[[], object]) -> float:
    """CPU seconds of this process: autograd's and gloo's threads count, waiting does not."""
    if dist.is_initialized():
        dist.barrier()
    begin = time.process_time()
    function()
    return time.process_time() - begin


def plain(stage: nn.Module) -> None:
    x = batch()
    stage(x).backward(torch.ones_like(x))


def split(stage: nn.Module) -> tuple[float, float, float]:
    """CPU seconds of F, B and W."""
    begin = time.process_time()
    x = batch()
    output = stage(x)
    after_f = time.process_time()
    _, weight_grads = backward_input(output, torch.ones_like(x), x)
    del output
    after_b = time.process_time()
    weight_grads.accumulate()
    return after_f - begin, after_b - after_f, time.process_time() - after_b


def batch() -> Tensor:
    return torch.ones(2, TIME, HIDDEN_SIZE, requires_grad=True)


if __name__ == "__main__":
    main()

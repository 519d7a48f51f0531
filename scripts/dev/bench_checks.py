#!/usr/bin/env python
"""The cost of each check against silent corruption, in percent of a training step.

    python scripts/dev/bench_checks.py                              # 2 ranks, a GPT of 4 layers, gloo
    python scripts/dev/bench_checks.py --ranks 4 --replicate 2 --hidden 256 --repeats 30

Steps without a check, with checked messages, followed by a check of replicas, and steps that are replayed run
in turns; figures are medians of the wall time. The last column divides the cost of replicas and replay by
debug.every (100), as a run has it. With --replicate 1 there are no copies: then the cost is that of checksums
and the gather alone.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
import torch.distributed as dist

from zbpp.launch import on_ranks
from zbpp.models.gpt import Gpt
from zbpp.runtime import Pipeline, make_mesh
from zbpp.runtime.world import world

NUM_WARM_UPS, EVERY, VOCAB = 3, 100, 256
KINDS = ("plain", "messages", "replicas", "replay")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--time", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="of a microbatch")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    found: dict[str, float] = on_ranks(options.ranks, measure, vars(options))
    print(
        f"{options.ranks} processes, replicate={options.replicate}, {options.schedule}, {options.layers} "
        f"layers of {options.hidden}, {options.repeats} repeats, torch {torch.__version__}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    print(f"{'check':<10}{'step ms':>10}{'cost %':>10}{'in a run %':>12}")
    for kind in KINDS:
        cost = 100 * (found[kind] / found["plain"] - 1)
        in_run = cost if kind in ("plain", "messages") else cost / EVERY
        print(f"{kind:<10}{found[kind]:>10.2f}{cost:>10.1f}{in_run:>12.2f}")


def measure(options: dict[str, int | str]) -> dict[str, float]:
    """{kind: the median step in ms}, of this process."""
    torch.set_num_threads(1)
    with world(device="cpu"):
        mesh = make_mesh(replicate=int(options["replicate"]))
        pipelines = [made(options, mesh, check_messages=on) for on in (False, True)]
        (plain, optimizer), (checked, other) = pipelines
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(NUM_WARM_UPS + int(options["repeats"])):
            for kind in KINDS:
                pair = (checked, other) if kind == "messages" else (plain, optimizer)
                seconds = one_step(*pair, kind, options, number)
                if number >= NUM_WARM_UPS:
                    times[kind].append(seconds)
        for pipeline, _ in pipelines:
            pipeline.close()
    return {kind: 1000 * median(some) for kind, some in times.items()}


def made(
    options: dict[str, int | str], mesh: object, *, check_messages: bool
) -> tuple[Pipeline, torch.optim.Optimizer]:
    model = Gpt(
        vocab_size=VOCAB,
        num_layers=int(options["layers"]),
        hidden_size=int(options["hidden"]),
        num_heads=4,
        sequence_length=int(options["time"]),
    )
    pipeline = Pipeline(
        model,
        str(options["schedule"]),
        num_microbatches=int(options["microbatches"]),
        mesh=mesh,  # type: ignore[arg-type]  # a DeviceMesh
        check_messages=check_messages,
    )
    return pipeline, torch.optim.AdamW(pipeline.parameters(), lr=1e-3)


def one_step(
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    kind: str,
    options: dict[str, int | str],
    number: int,
) -> float:
    generator = torch.Generator().manual_seed(number)
    shape = int(options["microbatches"]) * int(options["rows"]), int(options["time"]) + 1
    tokens = torch.randint(VOCAB, shape, generator=generator)
    dist.barrier()
    begin = time.perf_counter()
    optimizer.zero_grad()
    with pipeline.replaying() if kind == "replay" else nullcontext():
        pipeline.step(tokens[:, :-1], target=tokens[:, 1:])
    optimizer.step()
    if kind == "replicas":
        pipeline.check_replicas(optimizer)
    dist.barrier()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()

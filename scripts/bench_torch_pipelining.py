#!/usr/bin/env python
"""The same Llama through torch's Schedule classes, on torch's runtime and on zbpp.torch_pipelining.

    python scripts/bench_torch_pipelining.py                    # two ranks (gloo): about four minutes
    python scripts/bench_torch_pipelining.py --blocks plain --repeats 15
    python scripts/bench_torch_pipelining.py --hidden 32 --repeats 1    # a trial

Blocks are plain, checkpointed (not reentrant) or compiled one by one. Both runtimes take turns of one step;
a time is the median over the turns, of the slower rank. Live MiB: the most that a step holds over what was
there before, of the fuller rank. Forwards: how often a block ran in one step, over blocks x microbatches.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from zbpp import torch_pipelining
from zbpp.job.agreement import gather
from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.measure.live_tensors import live_bytes
from zbpp.models.llama import Llama

SCHEDULES = ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
BLOCKS = ("plain", "checkpointed", "compiled")
RUNTIMES: dict[str, Any] = {"torch": pipelining, "zbpp": torch_pipelining}
MICROBATCHES, ROWS, LENGTH, LAYERS, VOCAB = 8, 2, 128, 8, 512
MIB = 2**20
# Inductor's donated buffers don't allow retain_graph=True, which torch's split needs: rank 0 raises, and the
# other rank waits for it.
REFUSED = {("torch", "compiled", name): "raises in I" for name in SCHEDULES[2:]}


class Counted(nn.Module):
    """A block that counts its forwards, maybe under a checkpoint."""

    count = 0

    def __init__(self, block: nn.Module, kind: str) -> None:
        super().__init__()
        self.block, self.kind = block, kind
        if kind == "compiled":
            block.compile()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpointed":
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: Tensor) -> Tensor:
        Counted.count += 1
        return self.block(x)


def made(
    runtime: Any, name: str, kind: str, rank: int, size: int, hidden: int
) -> tuple[Callable[[], None], int]:
    """(a step, the number of this rank's blocks)."""
    is_single = name == "Schedule1F1B"
    count = size if is_single else 2 * size
    is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    numbers = [rank] if is_single else [rank, count - 1 - rank if is_v else rank + size]
    model = Llama(
        vocab_size=VOCAB, num_layers=LAYERS, hidden_size=hidden, num_heads=4, sequence_length=LENGTH
    )
    modules, num_blocks = [], 0
    for number in numbers:
        stage = model.build_stage(number, count)
        for place, block in enumerate(stage):
            if type(block).__name__ == "Block":
                stage[place] = Counted(block, kind)
                num_blocks += 1
        modules.append(stage)
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(each, number, count, device)
        for each, number in zip(modules, numbers, strict=True)
    ]
    kind_of = getattr(runtime, name)
    schedule = kind_of(stages[0] if is_single else stages, MICROBATCHES, loss_fn=model.loss)
    drawn = torch.randint(
        VOCAB, (MICROBATCHES * ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    args = (drawn[:, :-1],) if 0 in numbers else ()
    target = drawn[:, 1:] if count - 1 in numbers else None

    def step() -> None:
        for each in modules:
            each.zero_grad(set_to_none=False)
        schedule.step(*args, target=target, return_outputs=False)

    return step, num_blocks


def measure(options: argparse.Namespace) -> list[str]:
    lines = []
    with world(device="cpu") as here:
        for kind in options.blocks:
            for name in options.schedules:
                found = row(kind, name, here.rank, here.size, options.hidden, options.repeats)
                lines.append(f"{kind:<14}{name:<26}{found}")
                if here.rank == 0:
                    print(lines[-1], file=sys.stderr, flush=True)
    return lines


def row(kind: str, name: str, rank: int, size: int, hidden: int, repeats: int) -> str:
    steps, texts = {}, []
    seconds: dict[str, list[float]] = {}
    for who, runtime in RUNTIMES.items():
        if (who, kind, name) in REFUSED:
            texts.append(f"{who}: {REFUSED[who, kind, name]}")
            continue
        step, blocks = made(runtime, name, kind, rank, size, hidden)
        problem = ""
        try:
            for _ in range(3):
                step()
        except Exception as error:  # a runtime may refuse
            problem = f"{type(error).__name__}: {error}".partition("\n")[0][:60]
        problems = gather(problem)
        if any(problems):
            texts.append(f"{who}: {next(filter(None, problems))}")
            continue
        Counted.count = 0
        step()
        calls = max(gather(Counted.count / (blocks * MICROBATCHES)))
        highest = max(gather(live_bytes(step, torch.device("cpu")).highest)) / MIB
        steps[who], seconds[who] = step, []
        texts.append(f"{who}: {highest:6.1f} MiB, forwards {calls:.2f}")
    for _ in range(repeats):
        for who, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            seconds[who].append(max(gather(time.perf_counter() - begin)))
    times = {who: 1e3 * median(each) for who, each in seconds.items()}
    texts += [f"{who} {each:.0f} ms" for who, each in times.items()]
    if len(times) == 2:
        ratios = [ours / theirs for ours, theirs in zip(seconds["zbpp"], seconds["torch"], strict=True)]
        texts.append(f"zbpp/torch {median(ratios):.3f}")
    return "  ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=BLOCKS)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the Llama")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each runtime")
    options = parser.parse_args()
    sizes = f"{LAYERS} layers of {options.hidden}, {MICROBATCHES} microbatches of {ROWS} x {LENGTH} tokens"
    print(f"torch {torch.__version__}, 2 ranks, Llama: {sizes}; {options.repeats} turns")
    print("\n".join(on_ranks(2, measure, options)))


if __name__ == "__main__":
    main()

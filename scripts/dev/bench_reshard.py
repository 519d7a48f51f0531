#!/usr/bin/env python
"""Print what each `reshard` costs (ms of F, B and W) and what it holds (MiB of live tensors).

2 pipeline ranks x 2 shards, 4 processes on gloo, a Llama in float32 without an optimizer. The three ways of
freeing gathered weights run in turns. Costs are those that `measured_costs` gives, with which a run plans
again. "held" is the most that a pipeline's first step adds to the memory of a rank: gathered weights,
gradients before and after they are reduced, activations.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

NUM_RANKS, NUM_SHARDS, NUM_MICROBATCHES, TIME = 2, 2, 4, 32
SCHEDULE = "zb_h1"
MIB = 2**20


class Options(NamedTuple):
    """repeats: measured steps of each way. layers: of the whole model. hidden: its hidden size."""

    repeats: int
    layers: int
    hidden: int


class Row(NamedTuple):
    """One way on one stage: ms of its actions and of the whole step, and bytes."""

    reshard: str
    stage: int
    f: float
    b: float
    w: float
    makespan: float
    simulated: float
    held: int

    def cells(self) -> tuple[str, ...]:
        """The row as it is printed."""
        times = (f"{each:.1f}" for each in (self.f, self.b, self.w, self.makespan, self.simulated))
        return (self.reshard, str(self.stage), *times, f"{self.held / MIB:.1f}")


def main() -> None:
    """Run the ranks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each way (default: 5)")
    parser.add_argument("--layers", type=int, default=8, help="of the whole model (default: 8)")
    parser.add_argument("--hidden", type=int, default=384, help="hidden size (default: 384)")
    options = Options(**vars(parser.parse_args()))
    from zbpp.launch import on_ranks
    from zbpp.render.table import aligned

    weights, rows = on_ranks(NUM_RANKS * NUM_SHARDS, measure, options)
    print(__doc__.partition("\n")[0])
    print(
        f"{NUM_RANKS} ranks x {NUM_SHARDS} shards, {SCHEDULE}, {NUM_MICROBATCHES} x {TIME} tokens, "
        f"{options.layers} Llama blocks of hidden size {options.hidden};"
    )
    print(
        f"whole weights of a stage: {' and '.join(f'{each / MIB:.1f}' for each in weights)} MiB; medians of "
        f"{options.repeats} steps; {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
    )
    head = ("reshard", "stage", "F", "B", "W", "makespan", "simulated", "held MiB")
    print("\n".join(aligned([head, *(row.cells() for row in rows)])))


def measure(options: Options) -> tuple[list[int], list[Row]]:
    """Bytes of each stage's whole weights, and the rows. Called by every rank."""
    import torch

    from zbpp.models.llama import Llama
    from zbpp.runtime import Pipeline, Recorder, make_mesh, measured_costs
    from zbpp.runtime.fully_shard import RESHARD
    from zbpp.runtime.memory import live_bytes
    from zbpp.runtime.world import gather, world
    from zbpp.schedule import simulate

    model = Llama(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_heads=4,
        sequence_length=TIME,
    )
    tokens = torch.randint(256, (NUM_MICROBATCHES, TIME + 1))
    with world(device="cpu", timeout=300):
        mesh = make_mesh(shard=NUM_SHARDS)
        pipelines: dict[Any, Pipeline] = {
            way: Pipeline(model, SCHEDULE, num_microbatches=NUM_MICROBATCHES, mesh=mesh, reshard=way)
            for way in RESHARD
        }
        held: dict[str, list[int]] = {}  # by rank
        timelines: dict[str, list[Any]] = {way: [] for way in RESHARD}
        for turn in range(options.repeats + 1):
            for way, pipeline in pipelines.items():

                def step(pipeline: Pipeline = pipeline) -> None:
                    pipeline.step(tokens[:, :-1], target=tokens[:, 1:])

                if turn == 0:  # weights that stay are gathered for the first time
                    held[way] = gather(live_bytes(step, pipeline.device).highest)
                    continue
                for parameter in pipeline.parameters():
                    parameter.grad = None
                    parameter.data.to_local().mul_(0.999)  # as an optimizer would
                with pipeline.using(Recorder()) as recorder:
                    step()
                timelines[way].append(recorder.timeline())
        weights = gather(sum(each.nbytes for each in pipelines["step"].parameters()))[::NUM_SHARDS]
        rows = []
        for way, found in timelines.items():
            costs = measured_costs(*found)
            told = simulate(found[0].timetable, costs).makespan
            makespan = median(each.makespan for each in found)
            for stage, times in enumerate(zip(costs.f, costs.b, costs.w, strict=True)):
                most = max(held[way][stage * NUM_SHARDS :][:NUM_SHARDS])
                rows.append(Row(way, stage, *times, makespan, told, most))
        for pipeline in pipelines.values():
            pipeline.close()
        return weights, rows


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Do W's hide the exchanges of experts? EMULATED: stages sleep, an exchange is a timer. Or --real.

    python scripts/bench_exchange.py                                     # zb_h1, 4 ranks, 16 microbatches
    python scripts/bench_exchange.py --placement v --ranks 8 --microbatches 32 --share .25
    python scripts/bench_exchange.py --exchanges 4 --layers 16           # shorter ones, and shorter W tasks

F, B and W of a rank take --ms each without exchanges; exchanges are --share of the rank's time. Plans:

    exposed     zb_h1 (zb_v in a V); every exchange is waited for
    as it is    the same plan; pending W's run in the exchanges
    postponed   zb_auto's plan for the costs measured under "exposed"; its memory is 1F1B's and one `deferred`
    hidden      the first plan and the same model without exchanges, which no overlap can beat

The plans take turns, a step each. The predicted step is simulated with the costs that this job measured. The
exit status is 1 if a bit of a loss or a gradient differs between the first three, or if "postponed" takes 5 %
longer than predicted.

    python scripts/bench_exchange.py --real                              # 2 ranks x 2 processes with experts

A small llama with experts, whose processes exchange rows on gloo. The first three plans take turns. On a
machine with fewer cores than processes, the processes mostly wait for each other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zbpp.benchmark.interleaved_timing import without_garbage_collection
from zbpp.features.experts.overlap_exchange import OverlapExchange
from zbpp.job.agreement import gather
from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.measure import measured_costs
from zbpp.models.emulated import Emulated
from zbpp.models.llama import Llama
from zbpp.observers.recorder import Recorder
from zbpp.planning import lower_bound, plan
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.dtensors import local_of
from zbpp.runtime.processes.mesh import MeshPosition, make_mesh, planned_by_rank_0
from zbpp.schedule import Costs, Timeline, Timetable, simulate

WIDTH = 8
VOCAB, TIME, SEQUENCES = 256, 128, 2  # of --real: words, tokens in a sequence, sequences in a microbatch


class Run(NamedTuple):
    """A plan that takes its turns."""

    name: str
    timetable: Timetable
    pipeline: Pipeline
    recorder: Recorder
    timelines: list[Timeline]
    found: list[Tensor]  # losses and gradients of each step


def exchange_of(options: argparse.Namespace) -> float:
    """The time (ms) of exchanges inside F of a rank, and inside B: together `share` of F + B + W."""
    return float(1.5 * options.ms * options.share / (1 - options.share))


def costs_of(options: argparse.Namespace, *, with_exchanges: bool = True) -> Costs:
    """Costs per stage, as they are set."""
    stages = 2 if options.placement == "v" else 1
    exchange = exchange_of(options) * with_exchanges
    computing = options.ms + exchange
    times = {"f": computing, "b": computing, "w": options.ms, "exchange": exchange}
    return Costs(**{name: time / stages for name, time in times.items()})


def model_of(options: argparse.Namespace, costs: Costs) -> Emulated:
    """In the first `exchanges` layers of a stage, exchanges and the F and B around them."""
    stages = 2 if options.placement == "v" else 1
    layers = options.layers // stages
    exchanges = min(options.exchanges, layers)
    numbers: dict[str, Any] = costs.numbers
    part = numbers["exchange"] / exchanges
    exchange = [part if layer < exchanges else 0.0 for layer in range(layers)] * (options.ranks * stages)
    computing = (numbers["f"] - numbers["exchange"]) / layers
    times = [computing + each for each in exchange]
    return Emulated(
        num_layers=len(exchange),
        f=times,
        b=times,
        w=numbers["w"] / layers,
        exchange=exchange,
        hidden_size=WIDTH,
    )


def start(
    name: str, model: Any, timetable: Timetable, options: argparse.Namespace, *extras: Any, mesh: Any = None
) -> Run:
    recorder = Recorder()
    pipeline = Pipeline(model, timetable, extras=[*extras, recorder], timeout=120.0, mesh=mesh)
    run = Run(name, timetable, pipeline, recorder, [], [])
    step(run, options)  # the first step also agrees on shapes
    run.timelines.clear()
    run.found.clear()
    return run


def step(run: Run, options: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(run.pipeline.place.data_part)
    if options.real:
        rows = torch.randint(VOCAB, (options.microbatches * SEQUENCES, TIME + 1), generator=generator)
        x, target = rows[:, :-1], rows[:, 1:]
    else:
        x, target = (torch.randn(options.microbatches, WIDTH, generator=generator) for _ in range(2))
    torch.distributed.barrier()
    with without_garbage_collection():
        losses = run.pipeline.step(x, target=target)
    run.timelines.append(run.recorder.timeline())
    gradients = [each.grad for each in run.pipeline.parameters() if each.grad is not None]
    run.found[:] = [*losses, *(local_of(each).clone() for each in gradients)]
    for each in run.pipeline.parameters():
        each.grad = None


def bench(options: argparse.Namespace) -> tuple[list[str], bool]:
    """On every rank: (lines of the table, whether all is as it must be)."""
    with world(device="cpu", timeout=120.0):
        schedule = "zb_v" if options.placement == "v" else "zb_h1"
        given, without = costs_of(options), costs_of(options, with_exchanges=False)
        model = model_of(options, given)
        timetable = plan(schedule, options.ranks, options.microbatches)
        first = start("exposed", model, timetable, options)
        for _ in range(3):
            step(first, options)
        measured = measured_costs(*first.timelines)
        first.timelines.clear()
        limit = max(simulate(timetable, given).peak_memory) + 0.5
        postponed = planned_by_rank_0(lambda: postponed_plan(options, measured, limit))
        computing = model_of(options, without)
        runs = [
            first,
            start("as it is", model, timetable, options, OverlapExchange()),
            start("postponed", model, postponed, options, OverlapExchange()),
            start("hidden", computing, timetable, options),
        ]
        for turn in range(options.repeats):
            for run in (*runs[turn % 4 :], *runs[: turn % 4]):
                step(run, options)
        costs = {"hidden": measured_costs(*runs[3].timelines), "exposed": without_exchange(measured)}
        share = f"{options.microbatches} microbatches, share {options.share:g}"
        times = f"{'as set':>9}{'predicted':>11}{'measured':>10}{'ratio':>8}"
        lines = [
            f"EMULATED, {options.ranks} ranks, {share}; ms",
            f"{'':10}{times}{'exposed: set':>14}{'measured':>10}{'memory':>8}",
            *(row_of(run, costs.get(run.name, measured), options) for run in runs),
        ]
        is_equal = all(gather(all(map(is_same, runs[:3], runs[1:3]))))
        late = makespan(runs[2]) / simulate(postponed, measured).makespan
        bound = lower_bound(
            "makespan",
            rank_of=timetable.rank_of,
            num_microbatches=options.microbatches,
            costs=given,
            memory_limit=limit,
        )
        lines.append(
            f"no plan in {limit:g} activations takes less than {bound.value:.1f} as set: {bound.argument}"
        )
        lines.append(f"losses and gradients are {'equal to the last bit' if is_equal else 'DIFFERENT'}")
        for run in runs:
            run.pipeline.close()
        return lines, is_equal and late < 1.05


def postponed_plan(options: argparse.Namespace, costs: Costs, limit: float) -> Timetable:
    return plan(
        "zb_auto",
        options.ranks,
        options.microbatches,
        costs=costs,
        memory_limit=limit,
        placement=options.placement,
        time_limit=options.time_limit,
    )


def bench_real(options: argparse.Namespace) -> tuple[list[str], bool]:
    """As `bench`, with rows that travel between processes: on 2 x options.ranks processes."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_layers": 2 * options.ranks}
    with world(device="cpu", timeout=120.0):
        mesh = make_mesh(replicate=2, expert=2)
        model = Llama(vocab_size=VOCAB, sequence_length=TIME, experts=8, **sizes)
        timetable = plan("zb_h1", options.ranks, options.microbatches)
        runs = [start("exposed", model, timetable, options, mesh=mesh)]
        for _ in range(3):
            step(runs[0], options)
        costs = measured_costs(*runs[0].timelines)
        limit = max(simulate(timetable, Costs()).peak_memory) + 0.5
        postponed = planned_by_rank_0(lambda: postponed_plan(options, costs, limit), MeshPosition(mesh))
        for name, each in (("as it is", timetable), ("postponed", postponed)):
            runs.append(start(name, model, each, options, OverlapExchange(), mesh=mesh))
        runs[0].timelines.clear()
        for turn in range(options.repeats):
            for run in (*runs[turn % 3 :], *runs[: turn % 3]):
                step(run, options)
        is_equal = all(gather(all(map(is_same, runs, runs[1:]))))
        head = "ms; F and B of a stage exchange for {} of {} and {}"
        longest = (f"{max(costs.numbers[name]):.1f}" for name in ("exchange", "f", "b"))
        lines = [head.format(*longest)]
        for run in runs:
            predicted = simulate(run.timetable, costs if run is not runs[0] else without_exchange(costs))
            exposed = median(max(each.exposed_exchange, default=0.0) for each in run.timelines)
            ratio = median(
                a.makespan / b.makespan for a, b in zip(run.timelines, runs[0].timelines, strict=True)
            )
            lines.append(
                f"{run.name:10}{predicted.makespan:9.1f} predicted{makespan(run):9.1f} measured, "
                f"{ratio:.3f} of exposed; {exposed:8.1f} of exchanges exposed"
            )
        lines.append(f"losses and gradients are {'equal to the last bit' if is_equal else 'DIFFERENT'}")
        for run in runs:
            run.pipeline.close()
        return lines, is_equal


def without_exchange(costs: Costs) -> Costs:
    return replace(costs, exchange=0.0)


def is_same(one: Run, other: Run) -> bool:
    return len(one.found) == len(other.found) and all(map(torch.equal, one.found, other.found))


def makespan(run: Run) -> float:
    return median(timeline.makespan for timeline in run.timelines)


def row_of(run: Run, costs: Costs, options: argparse.Namespace) -> str:
    """Step by the costs as they are set, by the measured ones, and as measured; then exposed exchange."""
    given = costs_of(options, with_exchanges=run.name != "hidden")
    as_set = simulate(run.timetable, given if run.name != "exposed" else without_exchange(given))
    predicted = simulate(run.timetable, costs)
    exposed = [max(timeline.exposed_exchange, default=0.0) for timeline in run.timelines]
    expected = max(simulate(run.timetable, given).exposed_exchange, default=0.0)
    if run.name == "exposed":
        expected = 2 * options.microbatches * exchange_of(options)
    step_ms = makespan(run)
    times = (
        f"{as_set.makespan:9.1f}{predicted.makespan:11.1f}{step_ms:10.1f}{step_ms / predicted.makespan:8.3f}"
    )
    memory = max(simulate(run.timetable, given).peak_memory)
    return f"{run.name:10}{times}{expected:14.1f}{median(exposed):10.1f}{memory:8.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="4; with --real 2")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--placement", choices=("one", "v"), default="one")
    parser.add_argument("--ms", type=float, default=10.0)
    parser.add_argument("--share", type=float, default=0.25, help="of a rank's time, in exchanges")
    parser.add_argument("--layers", type=int, default=4, help="of a rank, even; W is as many tasks")
    parser.add_argument("--exchanges", type=int, default=1, help="per stage; they share the time")
    parser.add_argument("--real", action="store_true", help="two replicas share experts; rows travel")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=10.0, help="of the search, s")
    options = parser.parse_args(argv)
    options.ranks = options.ranks or (2 if options.real else 4)
    num_processes = options.ranks * (2 if options.real else 1)
    lines, is_right = on_ranks(num_processes, bench_real if options.real else bench, options)
    print("\n".join(lines))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())

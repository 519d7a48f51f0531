#!/usr/bin/env python
"""Print how much of the reduction of gradients over replicas is hidden behind a step's last W's.

4 ranks x 2 replicas, 8 processes that sleep instead of computing (EMULATED stages), and reductions that take
at least --reduce ms a stage. Each schedule runs in turns in two ways: with each stage's reduction started
right after its last W, and with all reductions after all actions. Beside them the makespan that `simulate`
predicts from the costs that the first way measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

NUM_RANKS, NUM_REPLICAS, NUM_MICROBATCHES = 4, 2, 8
NUM_LAYERS, LAYER_MS = 8, 20.0  # F, B and W of each layer
SCHEDULES = ("1f1b", "zb_h1", "interleaved_1f1b", "interleaved_zb", "zb_v")


class Options(NamedTuple):
    """repeats: measured steps of each way. reduce: ms that a stage's reduction takes at least."""

    repeats: int
    reduce: float


def main() -> None:
    """Run the ranks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each way (default: 5)")
    parser.add_argument("--reduce", type=float, default=80.0, help="ms per stage (default: 80)")
    options = Options(**vars(parser.parse_args()))
    from zbpp.launch import on_ranks
    from zbpp.render.table import aligned

    rows = on_ranks(NUM_RANKS * NUM_REPLICAS, measure, options)
    print(__doc__.partition("\n")[0])
    print(
        f"EMULATED: {NUM_RANKS} ranks x {NUM_REPLICAS} replicas, m={NUM_MICROBATCHES}, {NUM_LAYERS} layers "
        f"of F=B=W={LAYER_MS:g} ms, {options.reduce:g} ms per stage's reduction; medians of "
        f"{options.repeats} steps, ms"
    )
    head = ("schedule", "overlapped", "all at the end", "ratio", "simulated", "measured / simulated")
    cells = [
        (name, f"{over:.1f}", f"{after:.1f}", f"{over / after:.3f}", f"{told:.1f}", f"{over / told:.3f}")
        for name, over, after, told in rows
    ]
    print("\n".join(aligned([head, *cells])))


def measure(options: Options) -> list[tuple[str, float, float, float]]:
    """Per schedule the makespans: overlapped, all reductions at the end, simulated. Called by every rank."""
    import torch

    from zbpp.job.world import world
    from zbpp.models.emulated import Emulated
    from zbpp.planning import plan
    from zbpp.runtime import Pipeline, Recorder, make_mesh, measured_costs
    from zbpp.schedule import Costs, simulate

    model = Emulated(num_layers=NUM_LAYERS, f=LAYER_MS, b=LAYER_MS, w=LAYER_MS)
    x = torch.ones(NUM_MICROBATCHES, 8)
    rows = []
    with world(device="cpu", timeout=120):
        mesh = make_mesh(replicate=NUM_REPLICAS)
        for name in SCHEDULES:
            num_stages = plan(name, NUM_RANKS, NUM_MICROBATCHES).num_stages
            each = LAYER_MS * NUM_LAYERS / num_stages
            costs = Costs(f=each, b=each, w=each, reduce=options.reduce)
            timetable = plan(name, NUM_RANKS, NUM_MICROBATCHES, costs=costs)
            with Pipeline(model, timetable, mesh=mesh) as pipeline:
                found: dict[bool, list[Any]] = {True: [], False: []}
                for turn in range(options.repeats + 1):
                    for is_overlapped in (True, False):
                        with (
                            reductions_of(options.reduce, is_overlapped=is_overlapped),
                            pipeline.using(Recorder()) as recorder,
                        ):
                            pipeline.step(x, target=x)
                        timeline = recorder.timeline()
                        if turn:
                            found[is_overlapped].append(timeline)
                told = simulate(timetable, measured_costs(*found[True])).makespan
                over, after = (median(run.makespan for run in found[way]) for way in (True, False))
                rows.append((name, over, after, told))
    return rows


@contextmanager
def reductions_of(milliseconds: float, *, is_overlapped: bool) -> Iterator[None]:
    """Inside, a stage's reduction takes at least so long, one after the other; or all start at the end."""
    from threading import Timer

    from zbpp.runtime.parallel.reduce import AllReduce

    start, finish = AllReduce.start, AllReduce.finish
    free = [0.0]  # when this process's last reduction ends
    timers: dict[int, Timer] = {}  # that end when the reduction does
    waiting: dict[int, Any] = {}

    def begin(self: Any, ended: Any) -> None:
        free[0] = max(free[0], time.perf_counter()) + milliseconds / 1e3
        start(self, None)
        timers[id(self)] = Timer(free[0] - time.perf_counter(), ended or (lambda: None))
        timers[id(self)].start()

    def slow_start(self: Any, ended: Any = None) -> None:
        if not self._all:
            return
        if is_overlapped:
            begin(self, ended)
        else:
            waiting[id(self)] = ended

    def slow_finish(self: Any) -> None:
        if id(self) in waiting:
            begin(self, waiting.pop(id(self)))
        finish(self)
        if id(self) in timers:
            timers.pop(id(self)).join()

    AllReduce.start, AllReduce.finish = slow_start, slow_finish  # type: ignore[method-assign]
    try:
        yield
    finally:
        AllReduce.start, AllReduce.finish = start, finish  # type: ignore[method-assign]


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Llama-3-8B with adapters on a 4-bit base: schedules, and cuts for ranks of unequal speed.

    python scripts/dev/unequal_ranks.py              the tables, planned
    python scripts/dev/unequal_ranks.py --emulated   four ranks of speeds 1:1:2:2 that sleep, measured

A step is given over its ideal, the time in which the ranks would do the work without ever being idle. Costs
are those of 1024 tokens: F, B, W of a layer 15, 17.5, .8 ms on a rank of speed 1, of the head 36, 37, 0 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.models.emulated import Emulated
from zbpp.partition import partition
from zbpp.planning import ChosenCut, better_order, choose_cut, plan
from zbpp.planning.cut.cut_timing import Layers
from zbpp.runtime import Pipeline
from zbpp.schedule import Costs, Timetable, simulate

LAYER = Costs(f=15, b=17.5, w=0.8)
LAYERS = [Costs(f=0.2, b=0, w=0), *[LAYER] * 32, Costs(f=36, b=37, w=0)]
FULL = [Costs(f=0.2, b=0, w=0.2), *[Costs(f=15, b=17.5, w=13)] * 32, Costs(f=36, b=37, w=36)]
SPEEDS = ([1, 1, 2, 2], [1, 2], [1, 1, 1, 3], [1, 1, 1, 1])
NAMES = {"1f1b": "1f1b", "zb_v": "zb_v", "interleaved_1f1b": "loop of 2"}
M, STEPS = 8, 6


def chosen(name: str, speeds: list[int], layers: list[Costs] = LAYERS, seconds: float = 0) -> ChosenCut:
    timetables = {name: plan(name, len(speeds), M)}
    return choose_cut(layers, speeds, M, timetables=timetables, time_limit=seconds)


def in_best_order(found: ChosenCut, speeds: list[int]) -> tuple[list[int], ChosenCut]:
    order, cut = better_order(found, LAYERS, speeds) or (range(len(speeds)), found)
    return [speeds[rank] for rank in order], cut


def ratio(makespan: float, found: ChosenCut) -> str:
    return f"{makespan / found.ideal:.3f}"


# ---------------------------------------------------------------- planned


def tables() -> None:
    print(f"cuts, m={M}: step / ideal, with an even cut -> with the best cut -> and the best order of ranks")
    for speeds in SPEEDS:
        cells, best = [], None
        for name, title in NAMES.items():
            found = chosen(name, speeds)
            ordered, cut = in_best_order(found, speeds)
            times = found.even, found.makespan, cut.makespan
            cells.append(f"{title} {' -> '.join(ratio(each, found) for each in times)}")
            best = min(best or (cut.makespan, name, ordered), (cut.makespan, name, ordered))
        _, name, ordered = best
        searched = chosen(name, ordered, seconds=6)
        cells.append(
            f"searched {ratio(searched.makespan, searched)} (bound {ratio(searched.bound, searched)})"
        )
        print(f"{':'.join(map(str, speeds)):8} {';  '.join(cells)}")
    found = chosen("zb_v", SPEEDS[0], FULL)
    print(f"full training, 1:1:2:2: zb_v {ratio(found.even, found)} -> {ratio(found.makespan, found)}\n")
    print("equal ranks, F : B : W = 10 : 12 : .5 for a rank's share: step / ideal, activations held")
    rows = [("1f1b", {}, 1), ("zb_h1", {}, 1), ("zb_v", {}, 1), ("v_half", {}, 1)]
    rows += [("interleaved_1f1b", {"stages_per_rank": 4}, 1), ("1f1b", {}, 4), ("zb_v", {}, 4)]
    for name, shape, slices in rows:
        cells = (adapted(name, p, m, slices, **shape) for p, m in ((4, 8), (8, 8), (8, 16), (8, 32)))
        more = [f", {each} per rank" for each in shape.values()] + [f", {slices} slices"] * (slices > 1)
        title = "".join([name, *more])
        print(f"{title:28} {'   '.join(cells)}")


def adapted(name: str, num_ranks: int, number: int, num_slices: int, **shape: int) -> str:
    timetable = plan(name, num_ranks, number, num_slices=num_slices, **shape)
    share = num_ranks / timetable.num_stages
    costs = Costs(f=10 * share, b=12 * share, w=0.5 * share, saved=share, deferred=0.8 * share)
    timeline = simulate(timetable, costs)
    return (
        f"p{num_ranks} m{number} {timeline.makespan / (22.5 * number):.3f}, {max(timeline.peak_memory):.2f}"
    )


# ---------------------------------------------------------------- emulated


def emulated() -> None:
    speeds = SPEEDS[0]
    even = plan("1f1b", 4, M)
    model = Layers(LAYERS, speeds)
    runs = [("1f1b, even cut", even, model.stage_costs(partition(model.work, 4), even.rank_of))]
    for name in NAMES:
        found = chosen(name, speeds)
        runs.append((f"{name}, {[*found.layers_per_stage]}", found.timetable, found.costs))
    ordered, cut = in_best_order(found, speeds)
    runs.append((f"{name}, ranks {ordered}, {[*cut.layers_per_stage]}", cut.timetable, cut.costs))
    on_ranks(4, run, runs)


def run(runs: list[tuple[str, Timetable, Costs]]) -> None:
    with world(device="cpu") as here:
        steps = [measured(timetable, costs) for _, timetable, costs in runs]
        if here.rank == 0:
            for (title, timetable, costs), step in zip(runs, steps, strict=True):
                predicted = simulate(timetable, costs).makespan
                times = f"measured {step:6.0f} ms, predicted {predicted:6.0f}: {step / predicted:.3f}"
                print(f"{title:62} {times}; even cut / this {steps[0] / step:.2f}")


def measured(timetable: Timetable, costs: Costs) -> float:
    """The median step (ms) of stages that sleep as long as their costs say."""
    model = Emulated(num_layers=timetable.num_stages, f=costs.f, b=costs.b, w=costs.w)
    found = []
    with Pipeline(model, timetable, num_microbatches=M) as pipeline:
        for _ in range(STEPS):
            x = torch.randn(M, 8)
            dist.barrier()
            begin = time.perf_counter()
            pipeline.step(x, target=x)
            dist.barrier()
            found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found[1:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--emulated", action="store_true")
    emulated() if parser.parse_args().emulated else tables()

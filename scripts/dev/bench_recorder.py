#!/usr/bin/env python
"""What the flight recorder costs: a step with it beside a step without it, in turns.

    python scripts/dev/bench_recorder.py                     # four ranks, gloo
    python scripts/dev/bench_recorder.py --ranks 1 --repeats 400

Every stage is one tiny linear layer, so that most of the time is the runtime's own. One pipeline runs steps
in turns: with the recorder, and without the line of Executor.run that notes the times. (Of two pipelines the
first-made one is slower, by more than the recorder costs.) Printed per rank: the medians over the
repeats of a step's CPU time (in the thread that runs it) and of its time on the clock, and the median of the
differences between neighbouring steps. The mark: less than 1 % of a step. A fourth figure is computed instead
of measured: the cost of a note by itself, times the instructions of a step. --control takes the notes out of
both: what is then left of the difference is noise. The thread that tells once a second where the rank stands
runs in both kinds of steps.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
import time
import timeit
from statistics import mean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zbpp.launch import on_ranks
from zbpp.planning import plan
from zbpp.runtime import Pipeline, executor
from zbpp.runtime.flight_recorder import FlightRecorder
from zbpp.runtime.world import gather, world

SIZE, NUM_WARM_UPS, MARK = 4, 20, 0.01
_NOTE = "note(clock())"


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--control", action="store_true")
    given = parser.parse_args()
    rows = on_ranks(given.ranks, measured, vars(given))
    print(
        f"{given.schedule}, {given.ranks} ranks, {given.microbatches} microbatches, "
        f"{given.repeats} steps each"
    )
    print("rank  clock  with us  without us  difference   computed")
    for rank, row in enumerate(rows):
        for name in ("cpu", "wall"):
            with_it, without, difference, computed = row[name]
            print(
                f"{rank:4}  {name:5}  {with_it:7.0f}  {without:10.0f}  {difference / without:10.2%}  "
                f"{computed / without:9.2%}"
            )
    of_cpu = [row["cpu"][2] / row["cpu"][1] for row in rows]
    of_step = [row["cpu"][2] / row["wall"][1] for row in rows]
    print(
        f"CPU time of the notes / CPU time of a step: mean of the ranks {mean(of_cpu):.2%}, {_span(of_cpu)}"
    )
    print(
        f"CPU time of the notes / time of a step:     mean of the ranks {mean(of_step):.2%}, {_span(of_step)}"
    )
    print(f"The mark is below {MARK:.0%}.")


def _span(values: list[float]) -> str:
    return f"{min(values):.2%} to {max(values):.2%}"


def measured(given: dict[str, Any]) -> list[Any]:
    """Every rank's figures in us: {clock: (with, without, median difference, cost of the notes alone)}."""
    torch.set_num_threads(1)
    with world(device="cpu", timeout=100) as here:
        pipeline = _pipeline(here.rank, given)
        part: Any = pipeline._engine._parts.executors["step"]
        without = _without_notes(part)
        runs = (without if given["control"] else part.run, without)
        batch = torch.randn(given["microbatches"], SIZE)
        times: dict[str, list[list[float]]] = {"cpu": [[], []], "wall": [[], []]}
        for number in range(NUM_WARM_UPS + given["repeats"]):
            order = (0, 1) if number % 2 else (1, 0)  # neither is always the first of a turn
            for each in order:
                part.run = runs[each]
                wall, cpu = time.perf_counter(), time.thread_time()
                pipeline.step(batch, target=batch)
                if number >= NUM_WARM_UPS:
                    times["cpu"][each].append(1e6 * (time.thread_time() - cpu))
                    times["wall"][each].append(1e6 * (time.perf_counter() - wall))
        notes = 1e6 * _seconds_per_note() * _num_instructions(pipeline)
        row = {
            name: (median(a), median(b), median(x - y for x, y in zip(a, b, strict=True)), notes)
            for name, (a, b) in times.items()
        }
        return gather(row)


def _pipeline(rank: int, given: dict[str, Any]) -> Pipeline:
    timetable = plan(given["schedule"], given["ranks"], given["microbatches"])
    stages = {index: nn.Linear(SIZE, SIZE) for index in timetable.stages_of(rank)}
    return Pipeline(stages, timetable, F.mse_loss)


def _without_notes(part: Any) -> Any:
    """Executor.run of an executor, without the notes."""
    source = textwrap.dedent(inspect.getsource(executor.Executor.run))
    if _NOTE not in source:
        raise SystemExit(f"Executor.run has no {_NOTE} any more: tell this script what to take out")
    names: dict[str, Any] = {}
    exec(source.replace(_NOTE, "pass"), vars(executor), names)
    return names["run"].__get__(part)


def _num_instructions(pipeline: Pipeline) -> int:
    return len(pipeline._engine._parts.executors["step"]._plain.functions)


def _seconds_per_note() -> float:
    """Of a note as Executor.run makes it."""
    note, clock = FlightRecorder(0).begin([]), time.monotonic
    count = 200_000
    names = {"note": note, "clock": clock}
    return min(timeit.repeat(_NOTE, globals=names, number=count, repeat=3)) / count


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""Microseconds that a runtime adds to each action: zbpp beside torch.distributed.pipelining.

    python scripts/dev/bench_overhead.py                          # one process, then two (gloo)
    python scripts/dev/bench_overhead.py --ranks 2 --schedules zb_v --microbatches 32 --json overhead.json

Every stage is one tiny linear layer, so that most of the time is the runtimes' own. Both runtimes execute
the same timetable, in turns of one step; figures are medians over the repeats, per action of rank 0.

    plain     the same forwards and backwards in a loop, without a runtime: the least that PyTorch needs
    total     CPU time of a step in the thread that runs it
    executor  the runtime's own part of the total: without the work of the stages (forward, loss, backward or
              its two halves) and of torch.distributed (send, recv, wait), which further steps measure call by
              call. The target is here: torch / zbpp >= 2.
    wall      a step's time on the clock: with two ranks mostly waiting for messages

CPU time depends least on other processes of the machine. gloo's threads are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from zbpp.autograd import WeightGrads
from zbpp.job.world import world
from zbpp.launch import on_ranks
from zbpp.planning import plan
from zbpp.runtime import Pipeline
from zbpp.runtime import stage as zbpp_stage
from zbpp.schedule import PlanError, Timetable

SCHEDULES = ("1f1b", "zb_h1", "interleaved_1f1b", "interleaved_zb", "zb_v")
SIZE, NUM_WARM_UPS, TARGET = 4, 3, 2.0
Step = Callable[[], Any]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes, a job for each")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, help="names of zbpp's schedules")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=50, help="steps of each runtime, in turn")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    rows = [row for num_ranks in arguments.ranks for row in launched(num_ranks, arguments)]
    show(rows, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def launched(num_ranks: int, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one job, as rank 0 measured them."""
    try:
        texts = {name: str(plan(name, num_ranks, arguments.microbatches)) for name in arguments.schedules}
    except PlanError as error:
        sys.exit(f"error: {error}")
    rows: list[Row] = on_ranks(num_ranks, measure, (texts, arguments.repeats))
    return rows


def measure(job: tuple[dict[str, str], int]) -> list[Row]:
    """What each rank does with (timetables as text, repeats); importable, since it is pickled."""
    texts, repeats = job
    with world(device="cpu") as here:
        return [
            {"ranks": here.size, "schedule": name, **compared(Timetable.parse(text), here.rank, repeats)}
            for name, text in texts.items()
        ]


def compared(timetable: Timetable, rank: int, repeats: int) -> Row:
    """Microseconds per action of this rank."""
    makers = {"plain": plain_step, "zbpp": zbpp_step, "torch": torch_step}
    steps = {name: make(timetable, rank) for name, make in makers.items()}
    samples: dict[str, list[float]] = {}
    for repeat in range(-NUM_WARM_UPS, repeats):  # the first steps agree on shapes
        for name, step in steps.items():
            cpu, wall = timed(step)
            own = own_work(step)
            if repeat >= 0:
                for what, seconds in (("total", cpu), ("wall", wall), ("own", own)):
                    samples.setdefault(f"{name} {what}", []).append(seconds)
    num_actions = len(timetable.rows[rank])
    figures = {what: median(seconds) * 1e6 / num_actions for what, seconds in samples.items()}
    executors = {f"{name} executor": figures[f"{name} total"] - figures[f"{name} own"] for name in steps}
    return {"actions": num_actions, **figures, **executors}


# ---------------------------------------------------------------- clocks


def timed(step: Step) -> tuple[float, float]:
    """(CPU seconds of this thread, seconds on the clock)."""
    dist.barrier()
    cpu, wall = time.thread_time(), time.perf_counter()
    step()
    return time.thread_time() - cpu, time.perf_counter() - wall


def own_work(step: Step) -> float:
    """CPU seconds of a step that are the stages' own, whatever runs them."""
    places: list[tuple[Any, str]] = [
        (nn.Linear, "forward"),
        (sys.modules[__name__], "difference"),
        (zbpp_stage, "split"),
        (WeightGrads, "accumulate"),
        *((torch_stage, f"stage_backward{kind}") for kind in ("", "_input", "_weight")),
        *((dist.ProcessGroup, name) for name in ("send", "recv")),
        (dist.Work, "wait"),
    ]
    seconds = [0.0]
    dist.barrier()
    with ExitStack() as stack:
        for place, name in places:
            stack.enter_context(patch.object(place, name, counted(getattr(place, name), seconds)))
        step()
    return seconds[0]


def counted(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        result = function(*args, **kwargs)
        seconds[0] += time.thread_time() - begin
        return result

    return call


# ---------------------------------------------------------------- what is compared


def stages_for(timetable: Timetable, rank: int) -> dict[int, nn.Module]:
    return {stage: nn.Linear(SIZE, SIZE) for stage in timetable.stages_of(rank)}


def difference(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).sum()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return difference(output, target)  # by its name in this module: `own_work` puts another there


def zbpp_step(timetable: Timetable, rank: int) -> Step:
    pipeline = Pipeline(stages_for(timetable, rank), timetable, loss_fn)
    x = torch.ones(timetable.num_microbatches, SIZE)
    return lambda: pipeline.step(x, target=x)


def torch_step(timetable: Timetable, rank: int) -> Step:
    """torch's runtime, given the timetable as its CSV, where B is I and BW is B."""
    stages = [
        PipelineStage(module, stage, timetable.num_stages, torch.device("cpu"))
        for stage, module in stages_for(timetable, rank).items()
    ]
    schedule = _PipelineScheduleRuntime(stages, timetable.num_microbatches, loss_fn)
    letters = {"F": "F", "B": "I", "W": "W", "BW": "B"}
    rows = [[f"{a.stage}{letters[a.op.name]}{a.microbatch}" for a in row] for row in timetable.rows]
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("\n".join(",".join(row) for row in rows))
        file.flush()
        schedule._load_csv(file.name)
    x = torch.ones(timetable.num_microbatches, SIZE)
    args = (x,) if any(stage.is_first for stage in stages) else ()
    target = x if any(stage.is_last for stage in stages) else None
    return lambda: schedule.step(*args, target=target, return_outputs=False)


def plain_step(timetable: Timetable, rank: int) -> Step:
    """The same F's and backwards without any runtime; B does all, W nothing."""
    modules, actions = stages_for(timetable, rank), list(timetable.rows[rank])
    last, gradient = timetable.num_stages - 1, torch.ones(1, SIZE)

    def step() -> None:
        roots = {}
        for stage, op, microbatch in actions:
            if op.name == "F":
                x = gradient.detach().requires_grad_(stage > 0)
                output = modules[stage](x)
                roots[stage, microbatch] = loss_fn(output, x) if stage == last else output
            elif op.name != "W":
                root = roots.pop((stage, microbatch))
                torch.autograd.backward(root, None if stage == last else gradient)

    return step


# ---------------------------------------------------------------- output


def show(rows: list[Row], arguments: argparse.Namespace) -> None:
    print(
        f"microseconds per action of rank 0, {arguments.microbatches} microbatches, {arguments.repeats} "
        f"repeats, torch {torch.__version__}; load average {os.getloadavg()[0]:.1f}"
    )
    pair = f"{'zbpp':>8}{'torch':>8}"
    print(f"{'':<24}{'plain':>7}{'total':>16}{'executor':>16}{'torch/':>8}{'wall':>16}")
    print(f"{'ranks schedule':<24}{'':>7}{pair}{pair}{'zbpp':>8}{pair}")
    for row in rows:
        total, executor, wall = (
            f"{row[f'zbpp {what}']:>8.1f}{row[f'torch {what}']:>8.1f}"
            for what in ("total", "executor", "wall")
        )
        ratio = row["torch executor"] / row["zbpp executor"]
        remark = "" if ratio >= TARGET else "  MISSED"
        print(
            f"{row['ranks']:<6}{row['schedule']:<18}{row['plain total']:>7.1f}"
            f"{total}{executor}{ratio:>8.2f}{wall}{remark}"
        )


if __name__ == "__main__":
    main()

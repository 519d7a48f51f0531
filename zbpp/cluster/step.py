"""The simulated step of one mesh under one schedule, and what limits it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zbpp.cluster.layer_work import model_flops
from zbpp.cluster.mesh import Mesh
from zbpp.cluster.stage_costs import Run, StageWork, costs_of
from zbpp.planning import plan
from zbpp.schedule import Costs, Op, Timetable, simulate

_EVERY_MICROBATCH_HELD = ("gpipe", "looped_bfs")  # their memory grows with the number of microbatches
_FULL = 0.9  # share of a GPU's memory from which on memory counts as a limit


class Step(NamedTuple):
    """A predicted step. Times in ms, memory in bytes: the most of any rank.

    losses: by name, how much shorter (ms) the step would be without this cause.
    """

    run: Run
    schedule: str
    num_microbatches: int
    time: float
    memory: float
    losses: dict[str, float]

    @property
    def mesh(self) -> Mesh:
        return self.run.mesh

    @property
    def tokens(self) -> int:
        """The tokens in a step."""
        return self.run.tokens * self.num_microbatches * self.mesh.data

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.time * 1e3

    @property
    def tflops(self) -> float:
        """TFLOP/s of the model for each GPU; recomputation does not count."""
        return model_flops(self.run.sizes, self.tokens) / self.time / 1e9 / self.mesh.num_gpus

    @property
    def mfu(self) -> float:
        """The share of the GPUs' peak that the model's FLOPs take."""
        return self.tflops / self.run.hardware.gpu.peak_tflops

    @property
    def limit(self) -> str:
        """What costs the most time, with its share of the step; and memory, where it is nearly full."""
        name, lost = max(self.losses.items(), key=lambda item: item[1])
        text = f"{name} {lost / self.time:.0%}" if lost > 0.005 * self.time else "kernels"
        full = self.memory / self.run.hardware.gpu.memory_bytes
        return f"{text}, memory {full:.0%} full" if full >= _FULL else text


@lru_cache(maxsize=256)
def _planned(schedule: str, num_ranks: int, num_microbatches: int) -> Timetable:
    return plan(schedule, num_ranks, num_microbatches)


@lru_cache(maxsize=4096)
def most_in_flight(schedule: str, num_ranks: int, num_microbatches: int) -> tuple[int, int]:
    """(the number of stages, how many activations of its stages a rank holds between F and B at the most).

    Costs don't change it: a rank's order is given. Raises PlanError as `time_and_memory` does.
    """
    timetable = _planned(schedule, num_ranks, _simulated_counts(schedule, num_ranks, num_microbatches)[0])
    changes = [(row.ops == Op.F).astype(int) - np.isin(row.ops, (Op.B, Op.BW)) for row in timetable.rows]
    return timetable.num_stages, max(int(np.cumsum(each).max()) for each in changes)


def _simulated_counts(schedule: str, num_ranks: int, num_microbatches: int) -> list[int]:
    """With how many microbatches a step of so many is simulated: see `_Timed`."""
    if num_microbatches > 6 * num_ranks and schedule not in _EVERY_MICROBATCH_HELD:
        return [4 * num_ranks, 5 * num_ranks]
    return [num_microbatches]


def time_and_memory(run: Run, schedule: str, num_microbatches: int) -> tuple[float, float]:
    """The time of a step and the memory, as in a Step; the time is infinite where memory is too small.

    Raises PlanError for a number of microbatches that the schedule can't run, ValueError for more stages than
    layers.
    """
    timed = _Timed(schedule, run.mesh.pipeline, num_microbatches)
    work = costs_of(run, timed.rank_of)
    limit = run.hardware.gpu.memory_bytes - max(work.temporary)
    time, _, memory = timed.step(work.costs, limit)
    return time + _update(work, timed.rank_of), memory + max(work.temporary)


def predicted_step(run: Run, schedule: str, num_microbatches: int) -> Step:
    """The step of a run. Raises as `time_and_memory` does."""
    timed = _Timed(schedule, run.mesh.pipeline, num_microbatches)
    work = costs_of(run, timed.rank_of)
    update = _update(work, timed.rank_of)
    whole, tail, memory = timed.step(work.costs)
    free = type(work.costs)(**{**work.costs.numbers, "comm": 0.0, "reduce": 0.0})
    without_links, _, _ = timed.step(free)
    busy, mean = _work(work, timed.rank_of)
    losses = {
        "bubble": max(0.0, without_links - num_microbatches * busy),
        "uneven stages": num_microbatches * (busy - mean),
        "links": whole - tail - without_links,
        "tensor all-reduces": num_microbatches * sum(work.sums) / run.mesh.pipeline,
        "gradient reduction": tail,
        "optimizer": update,
    }
    if run.recompute:
        kept, _ = _work(costs_of(replace(run, recompute=False), timed.rank_of), timed.rank_of)
        losses["recompute"] = num_microbatches * (busy - kept)
    return Step(run, schedule, num_microbatches, whole + update, memory + max(work.temporary), losses)


def _update(work: StageWork, rank_of: tuple[int, ...]) -> float:
    """The optimizer's time on the rank where it takes longest (ms)."""
    ranks = [0.0] * (max(rank_of) + 1)
    for each, rank in zip(work.update, rank_of, strict=True):
        ranks[rank] += each
    return max(ranks)


def _work(work: StageWork, rank_of: tuple[int, ...]) -> tuple[float, float]:
    """(the time of the busiest rank, the mean time of a rank) for one microbatch's F, B and W (ms)."""
    stages = work.costs.per_stage(len(rank_of)).duration
    ranks = [0.0] * (max(rank_of) + 1)
    for stage, rank in enumerate(rank_of):
        ranks[rank] += sum(stages[op][stage] for op in (Op.F, Op.B, Op.W))
    return max(ranks), sum(ranks) / len(ranks)


class _Timed:
    """Simulates a step. For many microbatches it simulates 4p and 5p, and extrapolates the steady state."""

    def __init__(self, schedule: str, ranks: int, num_microbatches: int) -> None:
        self._num, self._ranks = num_microbatches, ranks
        counts = _simulated_counts(schedule, ranks, num_microbatches)
        if len(counts) > 1 and num_microbatches % ranks:  # raises PlanError for a schedule that refuses it
            _planned(schedule, ranks, 2 * ranks + num_microbatches % ranks)
        self._timetables = [_planned(schedule, ranks, count) for count in counts]
        self.rank_of = tuple(self._timetables[0].rank_of)

    def step(self, costs: Costs, limit: float = math.inf) -> tuple[float, float, float]:
        """(makespan, tail of the last reduction, peak memory). The makespan is infinite above the limit."""
        first = simulate(self._timetables[0], costs)
        memory = max(first.peak_memory)
        if memory > limit:
            return math.inf, 0.0, memory
        if len(self._timetables) == 1:
            return first.makespan, first.tail, memory
        last = simulate(self._timetables[1], costs)
        slope = (last.makespan - first.makespan) / self._ranks
        time = last.makespan + slope * (self._num - 5 * self._ranks)
        return time, last.tail, max(last.peak_memory)

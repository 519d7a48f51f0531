"""The simulated step of one mesh under one schedule, and what limits it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from zbpp.cluster.layer_work import model_flops
from zbpp.cluster.mesh import Mesh
from zbpp.cluster.stage_costs import Run, StageWork, costs_of
from zbpp.planning import plan
from zbpp.schedule import Costs, Op, Timetable, simulate

_EVERY_MICROBATCH_HELD = ("gpipe", "looped_bfs")  # their memory grows with the number of microbatches
_FULL = 0.9  # share of a GPU's memory from which on memory counts as a limit


class Step(NamedTuple):
    """A predicted step. Times in ms, memory in bytes: the most of any rank.

    losses: the time that a step would be shorter without the thing of that name.
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
        """TFLOP/s of the model for each GPU; nothing that is computed twice counts twice."""
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


def stage_ranks(schedule: str, num_ranks: int) -> tuple[int, ...]:
    """rank_of[stage] under a schedule."""
    return tuple(_planned(schedule, num_ranks, 2 * num_ranks).rank_of)


def predicted_step(
    run: Run, schedule: str, num_microbatches: int, *, timetable: Timetable | None = None
) -> Step:
    """The step of a run. timetable: instead of the one that the schedule's name stands for.

    Raises PlanError for a number of microbatches that the schedule can't run, ValueError for more stages than
    layers.
    """
    ranks = run.mesh.pipeline
    if timetable is None and num_microbatches <= 6 * ranks:
        timetable = _planned(schedule, ranks, num_microbatches)
    rank_of = stage_ranks(schedule, ranks) if timetable is None else timetable.rank_of
    work = costs_of(run, rank_of)
    update = max(
        sum(each for each, owner in zip(work.update, rank_of, strict=True) if owner == rank)
        for rank in range(ranks)
    )
    timed = _Timed(schedule, ranks, num_microbatches, timetable)
    whole, tail, memory = timed.step(work.costs)
    free = type(work.costs)(**{**work.costs.numbers, "comm": 0.0, "reduce": 0.0})
    without_links, _, _ = timed.step(free)
    busy, mean = _work(work, rank_of)
    losses = {
        "bubble": without_links - num_microbatches * busy,
        "uneven stages": num_microbatches * (busy - mean),
        "links": whole - tail - without_links,
        "tensor all-reduces": num_microbatches * sum(work.sums) / ranks,
        "gradient reduction": tail,
        "optimizer": update,
    }
    temporary = max(work.temporary)
    return Step(run, schedule, num_microbatches, whole + update, memory + temporary, losses)


def _work(work: StageWork, rank_of: tuple[int, ...]) -> tuple[float, float]:
    """What the busiest rank, and a rank on average, computes for one microbatch (ms)."""
    stages = work.costs.per_stage(len(rank_of)).duration
    ranks = [0.0] * (max(rank_of) + 1)
    for stage, rank in enumerate(rank_of):
        ranks[rank] += sum(stages[op][stage] for op in (Op.F, Op.B, Op.W))
    return max(ranks), sum(ranks) / len(ranks)


class _Timed:
    """Simulates a step. Of many microbatches it simulates 4p and 5p, and goes on with the steady state."""

    def __init__(self, schedule: str, ranks: int, num_microbatches: int, timetable: Timetable | None) -> None:
        self._num, self._ranks = num_microbatches, ranks
        if schedule in _EVERY_MICROBATCH_HELD and timetable is None:
            timetable = _planned(schedule, ranks, num_microbatches)
        if timetable is None:
            _check_count(schedule, ranks, num_microbatches)
            self._timetables = [_planned(schedule, ranks, times * ranks) for times in (4, 5)]
        else:
            self._timetables = [timetable]

    def step(self, costs: Costs) -> tuple[float, float, float]:
        """(makespan, tail of the last reduction, peak memory)."""
        found = [simulate(each, costs) for each in self._timetables]
        last = found[-1]
        time = last.makespan
        if len(found) > 1:
            time += (last.makespan - found[0].makespan) / self._ranks * (self._num - 5 * self._ranks)
        return time, last.tail, max(last.peak_memory)


def _check_count(schedule: str, ranks: int, num_microbatches: int) -> None:
    """Raise PlanError for a number of microbatches that the schedule refuses."""
    if num_microbatches % ranks:
        _planned(schedule, ranks, 2 * ranks + num_microbatches % ranks)

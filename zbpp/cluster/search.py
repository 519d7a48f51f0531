"""The simulated step of a run, and the best meshes, schedules and microbatches for a model on a cluster.

Candidates are sorted by a lower bound of their step's time: the microbatches' work, shared evenly among the
ranks. They are simulated in this order until the bound is above the slowest of the steps to be shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from zbpp.cluster.hardware import Hardware
from zbpp.cluster.layer_work import model_flops
from zbpp.cluster.model_sizes import ModelSizes
from zbpp.cluster.stage_costs import Mesh, Run, StageWork, costs_of, static_bytes, vocabulary_parallelism
from zbpp.planning import plan
from zbpp.ranges import ConfigError
from zbpp.schedule import Op, PlanError, Timetable, simulate
from zbpp.schedule.families import FAMILIES

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half")
SHOWN = 5  # steps of an answer
_MICROBATCHES = (1, 2, 4, 8)  # sequences in a microbatch
_MOST_RANKS = 128  # of a pipeline that is simulated
_MOST_SIMULATED = 6_000_000  # actions, with recompute and again without: about half a minute each
_FULL = 0.9  # share of a GPU's memory from which on memory counts as a limit
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Question:
    """What to search for. batch: sequences in a step. degrees: sizes of the mesh that are given.

    Raises ConfigError for values out of range and unknown names.
    """

    sizes: ModelSizes
    hardware: Hardware
    batch: int
    schedules: tuple[str, ...] = SCHEDULES
    degrees: dict[str, int] = field(default_factory=dict)
    head_at_once: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"--batch {self.batch}: write a whole number, 1 or more")
        for name in self.schedules:
            if name not in FAMILIES:
                raise ConfigError(f"schedule {name} can't be searched; write some of {', '.join(FAMILIES)}")
        for name in self.degrees:
            if name not in Mesh._fields:
                raise ConfigError(f"--degrees {name}=...: write {', '.join(Mesh._fields)}")


class Answer(NamedTuple):
    """steps: the best that fit, shortest first. tried, simulated: how many candidates.

    is_whole: whether the search has simulated all that could be faster than its steps.
    """

    question: Question
    steps: list[Step]
    tried: int
    simulated: int
    is_whole: bool


class Candidate(NamedTuple):
    """A way to run the batch. bound: no step of it takes less (ms)."""

    bound: float
    run: Run
    schedule: str
    num_microbatches: int


def search(question: Question, progress: Progress | None = None) -> Answer:
    """The question's answer. Recompute is tried if fewer than SHOWN steps fit without it.

    Raises ConfigError where no mesh can run the batch at all.
    """
    answer = Answer(question, [], 0, 0, is_whole=True)
    for recompute in (False, True):
        if len(answer.steps) < SHOWN:
            candidates = sorted(candidates_of(question, recompute), key=lambda each: each.bound)
            answer = _simulated(answer, candidates, progress)
    if not answer.tried:
        sizes = question.sizes
        raise ConfigError(
            f"--batch {question.batch}: no mesh of {question.hardware.num_gpus} GPUs can run it: the "
            "sequences must be divisible by replicate x shard x the microbatch's size, the layers "
            f"({sizes.num_layers}) no fewer than the pipeline's ranks, and the heads ({sizes.heads}, "
            f"{sizes.kv_heads} of keys) divisible by tensor"
        )
    return answer


def _simulated(answer: Answer, candidates: list[Candidate], progress: Progress | None) -> Answer:
    """The answer with the best steps of more candidates, which are sorted by their bounds."""
    steps, limit = list(answer.steps), answer.question.hardware.gpu.memory_bytes
    simulated, actions, is_whole = answer.simulated, 0, answer.is_whole
    for number, each in enumerate(candidates):
        if len(steps) == SHOWN and each.bound >= steps[-1].time:
            break
        if actions > _MOST_SIMULATED:
            is_whole = False
            break
        if progress:
            progress(number / len(candidates), f"{each.run.mesh} {each.schedule}")
        ranks = each.run.mesh.pipeline
        try:
            if _mean_static(each.run) > limit:
                continue
            step = predicted_step(each.run, each.schedule, each.num_microbatches)
        except (PlanError, ValueError):
            continue  # a number of microbatches, or of stages, that this schedule can't run
        simulated, actions = simulated + 1, actions + 6 * ranks * each.num_microbatches
        if step.memory <= limit:
            steps = sorted([*steps, step], key=lambda found: found.time)[:SHOWN]
    return Answer(answer.question, steps, answer.tried + len(candidates), simulated, is_whole)


def _mean_static(run: Run) -> float:
    """The mean of what ranks hold all the time (bytes): the heaviest rank holds no less."""
    return static_bytes(run, run.sizes.parameters / run.mesh.pipeline / run.mesh.tensor)


def candidates_of(question: Question, recompute: bool) -> Iterator[Candidate]:
    """All ways to run the batch whose layers and heads can be divided so."""
    sizes = question.sizes
    for mesh in meshes(question.hardware, question.degrees):
        divided = (sizes.kv_heads, sizes.heads, sizes.intermediate, sizes.vocab)
        if mesh.pipeline > min(sizes.num_layers, _MOST_RANKS) or any(each % mesh.tensor for each in divided):
            continue
        for sequences in _MICROBATCHES:
            num, rest = divmod(question.batch, mesh.data * sequences)
            if num < 1 or rest:
                continue
            run = Run(sizes, question.hardware, mesh, sequences, recompute, question.head_at_once)
            bound = _bound(run, num)
            for schedule in question.schedules if mesh.pipeline > 1 else question.schedules[:1]:
                yield Candidate(bound, run, schedule, num)


def meshes(hardware: Hardware, fixed: dict[str, int]) -> Iterator[Mesh]:
    """The meshes of the whole cluster. fixed: sizes that are given.

    Tensor parallelism stays inside a node, unless its degree is given. The ranks that read different data
    are all replicas, all shards, or shards inside a node with replicas over nodes. Raises ConfigError if the
    given sizes do not divide the cluster.
    """
    total, node = hardware.num_gpus, hardware.gpus_per_node
    if total % math.prod(fixed.values()):
        raise ConfigError(f"--degrees: their product does not divide {total} GPUs: write divisors of {total}")
    for tensor in _divisors(total) if "tensor" not in fixed else [fixed["tensor"]]:
        if tensor > node and "tensor" not in fixed:
            continue
        for pipeline in _divisors(total // tensor) if "pipeline" not in fixed else [fixed["pipeline"]]:
            data, rest = divmod(total, tensor * pipeline)
            inside = max(1, node // tensor)
            for shard in sorted({1, data, inside, fixed.get("shard", 1)} if not rest else ()):
                mesh = Mesh(pipeline, data // shard, shard, tensor)
                if not data % shard and all(getattr(mesh, name) == size for name, size in fixed.items()):
                    yield mesh


def _divisors(number: int) -> list[int]:
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def _bound(run: Run, num_microbatches: int) -> float:
    """The work of all microbatches, shared evenly among the ranks (ms)."""
    rank_of = tuple(range(run.mesh.pipeline))
    try:
        return num_microbatches * _work(costs_of(run, rank_of), rank_of)[1]
    except ValueError:
        return 0.0


# ---------------------------------------------------------------- one step


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
    def tokens_per_second(self) -> float:
        return self._tokens / self.time * 1e3

    @property
    def mfu(self) -> float:
        """The share of the GPUs' peak that the model's FLOPs take; recomputation does not count."""
        tflops = model_flops(self.run.sizes, self._tokens) / self.time / 1e9 / self.run.mesh.num_gpus
        return tflops / self.run.hardware.gpu.peak_tflops

    @property
    def _tokens(self) -> int:
        return self.run.tokens * self.num_microbatches * self.run.mesh.data

    @property
    def limit(self) -> str:
        """What costs the most time, with its share of the step; and memory, where it is nearly full."""
        name, lost = max(self.losses.items(), key=lambda item: item[1])
        text = f"{name} {lost / self.time:.0%}" if lost > 0.005 * self.time else "kernels"
        full = self.memory / self.run.hardware.gpu.memory_bytes
        return f"{text}, memory {full:.0%} full" if full >= _FULL else text


def predicted_step(run: Run, schedule: str, num_microbatches: int) -> Step:
    """The step of a run.

    Raises PlanError for a number of microbatches that the schedule can't run, ValueError for more stages than
    layers.
    """
    timetable = _planned(schedule, run.mesh.pipeline, num_microbatches)
    work = costs_of(run, timetable.rank_of)
    timeline = simulate(timetable, work.costs)
    without_links = simulate(timetable, replace(work.costs, links=None, reduce=0.0)).makespan
    busy, mean = _work(work, timetable.rank_of)
    tail, update = timeline.tail, _update(work, timetable.rank_of)
    losses = {
        "bubble": max(0.0, without_links - num_microbatches * busy),
        "uneven stages": num_microbatches * (busy - mean),
        "links": timeline.makespan - tail - without_links,
        "tensor all-reduces": num_microbatches * sum(work.sums) / run.mesh.pipeline,
        "gradient reduction": tail,
        "optimizer": update,
    }
    if run.recompute:
        kept, _ = _work(costs_of(replace(run, recompute=False), timetable.rank_of), timetable.rank_of)
        losses["recompute"] = num_microbatches * (busy - kept)
    memory = max(timeline.peak_memory) + max(work.temporary)
    return Step(run, schedule, num_microbatches, timeline.makespan + update, memory, losses)


@lru_cache(maxsize=256)
def _planned(schedule: str, num_ranks: int, num_microbatches: int) -> Timetable:
    return plan(schedule, num_ranks, num_microbatches)


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


# ---------------------------------------------------------------- as text


_COLUMNS = (
    "pipeline x replicate x shard x tensor",
    *("schedule", "microbatches", "GiB", "ms", "tokens/s", "MFU", "limited by"),
)
_NOTE = (
    "Not counted: hosts that are slower than their GPUs, congestion, stragglers, failures, reading data. "
    "Reductions overlap with the pipeline's end only; all-reduces inside layers overlap with nothing."
)


def as_text(answer: Answer) -> str:
    """A head, a table of the best steps, and a note on what the figures leave out."""
    question, hardware = answer.question, answer.question.hardware
    sizes, gpu = question.sizes, hardware.gpu
    head = (
        f"{sizes.parameters / 1e9:,.2f} B parameters, {question.batch:,} sequences of {sizes.sequence:,} "
        "tokens a step, mixed_bfloat16\n"
        f"{hardware.nodes:,} nodes of {hardware.gpus_per_node} GPUs of {gpu.memory:g} GiB and "
        f"{gpu.peak_tflops:g} TFLOP/s, of which kernels reach {gpu.achieved:.0%}"
    )
    counts = f"{answer.tried:,} ways, {answer.simulated:,} simulated"
    if not answer.is_whole:
        counts += "; others may be faster: --degrees, or names of schedules, narrow the search"
    if not answer.steps:
        return (
            f"{head}\n\nnothing fits in {gpu.memory:g} GiB a GPU, with recompute neither: take more GPUs, "
            f"or other --degrees\n{counts}"
        )
    rows = [_COLUMNS, *map(_cells, answer.steps)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    best = answer.steps[0].run.mesh.pipeline
    shared = [vocabulary_parallelism(sizes, best)] if best > 1 else []
    return "\n".join([head, "", *lines, "", counts, *shared, _NOTE])


def _cells(step: Step) -> tuple[str, ...]:
    return (
        str(step.run.mesh),
        step.schedule + " recompute" * step.run.recompute,
        f"{step.num_microbatches} of {step.run.sequences}",
        f"{step.memory / 2**30:.1f}",
        f"{step.time:,.0f}",
        f"{step.tokens_per_second:,.0f}",
        f"{step.mfu:.1%}",
        step.limit,
    )

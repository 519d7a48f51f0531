"""The best meshes, schedules and microbatches for a model on a cluster.

Candidates are sorted by a lower bound of their step's time: the microbatches' work, shared evenly among the
ranks. They are simulated in this order until the bound is above the slowest of the steps to be shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from zbpp.cluster.hardware import Hardware
from zbpp.cluster.mesh import NAMES, Mesh, meshes
from zbpp.cluster.model_sizes import ModelSizes
from zbpp.cluster.stage_costs import PRECISIONS, Run, costs_of, counts_of, parts_of, static_bytes
from zbpp.cluster.step import Step, most_in_flight, predicted_step, time_and_memory
from zbpp.families import FAMILIES
from zbpp.ranges import ConfigError
from zbpp.schedule import Op, PlanError

SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half")
_MICROBATCHES = (1, 2, 4, 8)  # sequences in a microbatch
_MOST = 10_000_000  # sequences in a batch
_MOST_ACTIONS = 300_000  # of the largest timetable that is simulated
_MOST_SIMULATED = 6_000_000  # actions, with recompute and again without: about half a minute each
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Question:
    """What to search for. batch: sequences in a step. degrees: sizes of the mesh that are given.

    microbatch_size: sequences; None: 1, 2, 4 and 8 are tried. recompute: whether layers compute their
    activations again in B; None: only if fewer than `top` candidates fit without. top: how many steps the
    answer has. Raises ConfigError for values out of range and unknown names.
    """

    sizes: ModelSizes
    hardware: Hardware
    batch: int
    schedules: tuple[str, ...] = SCHEDULES
    degrees: dict[str, int] = field(default_factory=dict)
    microbatch_size: int | None = None
    precision: str = "mixed_bfloat16"
    recompute: bool | None = None
    sequence_parallel: bool = False
    top: int = 5

    def __post_init__(self) -> None:
        for name, value in {"batch": self.batch, "top": self.top}.items():
            if not 1 <= value <= _MOST:
                raise ConfigError(f"--{name} {value}: write a whole number, 1 to {_MOST:,}")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"--precision {self.precision}: write {', '.join(PRECISIONS)}")
        for name in self.schedules:
            if name not in FAMILIES:
                raise ConfigError(f"schedule {name} can't be searched; write some of {', '.join(FAMILIES)}")
        for name in self.degrees:
            if name not in NAMES:
                raise ConfigError(f"--degrees {name}=...: write {', '.join(NAMES)}")


class Answer(NamedTuple):
    """steps: the best, shortest first. tried, simulated: how many candidates. why: why nothing fits, or "".

    unknown: how many candidates were left when the search had simulated as much as it may; none of them can
    be faster than `bound` ms.
    """

    question: Question
    steps: list[Step]
    tried: int
    simulated: int
    why: str = ""
    unknown: int = 0
    bound: float = 0.0


class _Found(NamedTuple):
    """least: the lowest of the candidates' memory bounds (bytes). left: those that were not simulated."""

    steps: list[Step]
    least: float
    simulated: int
    left: list[_Candidate]


class _Candidate(NamedTuple):
    bound: float
    order: int
    run: Run
    schedule: str
    num_microbatches: int

    @property
    def num_actions(self) -> int:
        """How many actions its simulations have, roughly: see step.py."""
        ranks = self.run.mesh.pipeline
        return 3 * ranks * min(self.num_microbatches, 9 * ranks)


def search(question: Question, progress: Progress | None = None) -> Answer:
    """The question's answer. Raises ConfigError where no mesh can run the batch at all."""
    choices = [False, True] if question.recompute is None else [question.recompute]
    steps: list[Step] = []
    left: list[_Candidate] = []
    tried = simulated = 0
    least = math.inf
    for recompute in choices:
        if len(steps) == question.top:
            break
        candidates = sorted(_candidates(question, recompute), key=lambda each: each[:2])
        if not candidates:
            raise ConfigError(_no_mesh(question))
        found = _simulated(question, candidates, progress)
        steps = sorted([*steps, *found.steps], key=lambda each: each.time)[: question.top]
        tried, simulated, least = (
            tried + len(candidates),
            simulated + found.simulated,
            min(least, found.least),
        )
        left += found.left
    why = "" if steps else _left_out(left) if left else _too_little(question, least)
    bound = min((each.bound for each in left), default=0.0)
    return Answer(question, steps, tried, simulated, why, len(left), bound)


def _simulated(question: Question, candidates: list[_Candidate], progress: Progress | None) -> _Found:
    """The best steps that fit, of candidates that are sorted by their bounds."""
    best: list[tuple[float, int, _Candidate]] = []
    left: list[_Candidate] = []
    limit, least, simulated, actions = question.hardware.gpu.memory_bytes, math.inf, 0, 0
    for number, each in enumerate(candidates):
        if len(best) == question.top and each.bound >= best[-1][0]:
            break
        if progress:
            progress(number / len(candidates), f"{each.run.mesh} {each.schedule}")
        lowest = _least_memory(each.run)
        least = min(least, lowest)
        if lowest > limit:
            continue
        if actions > _MOST_SIMULATED:
            left.append(each)
            continue
        try:
            if _held_memory(each) > limit:
                continue
            actions += each.num_actions
            time, memory = time_and_memory(each.run, each.schedule, each.num_microbatches)
        except (PlanError, ValueError):
            continue  # a number of microbatches, or of stages, that this schedule can't run
        simulated += 1
        if memory <= limit:
            best = sorted([*best, (time, each.order, each)])[: question.top]
    steps = [predicted_step(each.run, each.schedule, each.num_microbatches) for _, _, each in best]
    return _Found(steps, least, simulated, left)


def _candidates(question: Question, recompute: bool) -> Iterator[_Candidate]:
    order = 0
    for mesh in meshes(question.hardware, question.degrees):
        if _refuses(question.sizes, mesh):
            continue
        for sequences in [question.microbatch_size] if question.microbatch_size else _MICROBATCHES:
            if question.batch % (mesh.data * sequences):
                continue
            num = question.batch // (mesh.data * sequences)
            run = Run(
                question.sizes,
                question.hardware,
                mesh,
                sequences,
                question.precision,
                recompute,
                sequence_parallel=question.sequence_parallel,
            )
            bound = _bound(run, num)
            for schedule in question.schedules if mesh.pipeline > 1 else question.schedules[:1]:
                if 3 * mesh.pipeline * min(num, 6 * mesh.pipeline) <= _MOST_ACTIONS:
                    order += 1
                    yield _Candidate(bound, order, run, schedule, num)


def _refuses(sizes: ModelSizes, mesh: Mesh) -> bool:
    """Whether layers can't be cut into so many stages or parts."""
    parts = mesh.tensor
    is_odd = (
        sizes.kv_heads % parts or sizes.heads % parts or sizes.intermediate % parts or sizes.vocab % parts
    )
    return mesh.pipeline > sizes.num_layers or bool(is_odd)


def _bound(run: Run, num_microbatches: int) -> float:
    """The work of all microbatches, shared evenly among the ranks (ms)."""
    try:
        work = costs_of(run, range(run.mesh.pipeline))
    except ValueError:
        return 0.0
    stages = work.costs.per_stage(run.mesh.pipeline).duration
    whole = sum(sum(stages[op]) for op in (Op.F, Op.B, Op.W))
    return num_microbatches * whole / run.mesh.pipeline


def _least_memory(run: Run) -> float:
    """A lower bound (bytes): weights, gradients and states of the heaviest rank, and one microbatch."""
    first, layer, last = parts_of(run)
    stages = run.mesh.pipeline
    counts = counts_of(run, stages)
    parameters = [count * layer.parameters for count in counts]
    parameters[0] += first.parameters
    parameters[-1] += last.parameters
    one = min(counts) * _kept(run, layer.saved)
    return max(static_bytes(run, each) for each in parameters) + one


def _kept(run: Run, saved: float) -> float:
    """The least bytes that a layer keeps of a microbatch: 0 with recompute."""
    return 0.0 if run.recompute else saved


def _held_memory(candidate: _Candidate) -> float:
    """A lower bound (bytes): the lightest rank's weights, gradients and states, and its microbatches' peak.

    Raises PlanError or ValueError if the schedule can't run this number of microbatches or stages.
    """
    run = candidate.run
    stages, held = most_in_flight(candidate.schedule, run.mesh.pipeline, candidate.num_microbatches)
    _, layer, _ = parts_of(run)
    lightest = min(counts_of(run, run.mesh.pipeline)) * layer.parameters
    return static_bytes(run, lightest) + held * min(counts_of(run, stages)) * _kept(run, layer.saved)


def _no_mesh(question: Question) -> str:
    gpus = question.hardware.num_gpus
    degrees = ", ".join(f"{name}={size}" for name, size in question.degrees.items())
    given = f" with --degrees {degrees}" if degrees else ""
    return (
        f"--batch {question.batch}: no mesh of {gpus} GPUs{given} can run it: the sequences must be "
        f"divisible by replicate x shard x the microbatch's size, the layers ({question.sizes.num_layers}) "
        "no fewer than the pipeline's ranks, and the heads "
        f"({question.sizes.heads}, {question.sizes.kv_heads} of keys) divisible by tensor: "
        f"{_advice(question)}"
    )


def _advice(question: Question) -> str:
    batch, gpus = question.batch, question.hardware.num_gpus
    if not any(not _refuses(question.sizes, each) for each in meshes(question.hardware, question.degrees)):
        return "write other --degrees" if question.degrees else "take fewer GPUs"
    fitting = -(-batch // gpus) * gpus
    return "take fewer GPUs" if fitting > _MOST else f"write a larger batch, such as --batch {fitting}"


def _left_out(left: list[_Candidate]) -> str:
    return (
        f"nothing that was simulated fits, and {len(left):,} ways were not simulated: name schedules, or fix "
        "degrees, such as --degrees pipeline=16,tensor=8"
    )


def _too_little(question: Question, least: float) -> str:
    tried = ", with recompute neither" if question.recompute is None else ""
    ways = ["take more GPUs"]
    ways += ["other --degrees"] * bool(question.degrees)
    ways += ["drop --no-recompute"] * (question.recompute is False)
    ways += ["--precision bfloat16"] * (question.precision != "bfloat16")
    return (
        f"nothing fits in {question.hardware.gpu.memory:g} GiB a GPU{tried}: the weights, gradients and "
        f"states of the lightest mesh, and one microbatch, take {least / 2**30:,.1f} GiB; "
        + ", or ".join(ways)
    )

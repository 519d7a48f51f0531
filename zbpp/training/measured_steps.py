"""The figures of the steps that were measured action by action, and the summary of a run.

The progress line, the summary, `zbpp compare` and timeline.png show these figures, so their bubble rates
agree. They name the steps: the early steps of a run are slower than the later ones.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.devices import is_accelerator, name_of
from zbpp.features.activation_offload.activation_offload import offload_plan_of
from zbpp.features.activation_offload.copies import RankOffload, with_copies
from zbpp.features.experts.experts import has_experts
from zbpp.job.agreement import gather
from zbpp.job.world import World
from zbpp.measure import measured_costs, measured_costs_of_lengths, measured_links
from zbpp.planning import RankCosts, SlowestLink, slowest_link
from zbpp.runtime import Pipeline
from zbpp.runtime.processes.dtensors import local_of
from zbpp.runtime.processes.mesh import DIMENSIONS, EXPERT, PIPELINE, REPLICATE
from zbpp.schedule import Costs, Links, Timeline, Timetable, lower, simulate
from zbpp.schedule.interpret.timing import program_timeline
from zbpp.training.optim.update import Metrics
from zbpp.training.trainer import Callback, Trainer


class MeasuredSteps(NamedTuple):
    """Figures of measured steps, in ms.

    steps: their numbers, such as `steps 2-3, 101`. measured: the step with the median makespan. costs: the
    medians over all of them, with memory in activations of one rank's share of the model, the unit of
    `zbpp plan`, and with the links of the run's costs if these are known. predicted: the same timetable,
    simulated with these costs.
    """

    steps: str
    measured: Timeline
    predicted: Timeline
    costs: Costs

    @property
    def figures(self) -> dict[str, Any]:
        """What both metrics.jsonl and summary.json hold of it."""
        return {
            "measured_steps": self.steps,
            "measured_bubble_rate": self.measured.bubble_rate,
            "predicted_bubble_rate": self.predicted.bubble_rate,
        }


def measured_steps(
    timelines: Mapping[int, Timeline],
    offload: Sequence[RankOffload],
    lengths: Mapping[int, Sequence[float]] = MappingProxyType({}),
    links: Links | None = None,
) -> MeasuredSteps:
    """The figures of timelines, at least one, by the number of their step; all are of one timetable.

    lengths: of each step's microbatches, if these differ in length. Costs are then in two parts, and the step
    that is predicted has the lengths of the measured one. links: of the ranks, where they are known: they say
    what messages take in place of comm, which is that of messages whose receiver waits.
    """
    by_makespan = sorted(timelines, key=lambda step: timelines[step].makespan)
    step = by_makespan[len(by_makespan) // 2]
    measured = timelines[step]
    timetable = measured.timetable
    usual = RankCosts().per_stage(timetable.num_stages, timetable.num_ranks)
    if lengths:
        found = measured_costs_of_lengths([*timelines.values()], [lengths[each] for each in timelines])
        found = Costs.of_lengths(lengths[step], found)
    else:
        found = measured_costs(*timelines.values())
    costs = replace(found, saved=usual.saved, deferred=usual.deferred)
    if links is not None:
        costs = replace(costs, comm=0.0, links=links)
    return MeasuredSteps(_text(sorted(timelines)), measured, _simulated(timetable, costs, offload), costs)


def figures_of(trainer: Trainer) -> MeasuredSteps:
    """The figures of a trainer's measured steps."""
    offload = offload_plan_of(trainer.pipeline)
    return measured_steps(trainer.timelines, offload, trainer.lengths, trainer.links)


def link_waited_for(found: MeasuredSteps, timelines: Collection[Timeline]) -> SlowestLink | None:
    """The link between ranks that the step waits for most, simulated with the median of each link.

    found: the figures of these timelines.
    """
    costs = replace(found.costs, comm=0.0, links=measured_links(*timelines))
    return slowest_link(found.measured.timetable, costs)


def _simulated(timetable: Timetable, costs: Costs, offload: Sequence[RankOffload]) -> Timeline:
    """The simulated step, with its copies."""
    if not offload:
        return simulate(timetable, costs)
    return program_timeline([*map(with_copies, lower(timetable), offload)], costs)


def _text(numbers: Sequence[int]) -> str:
    """`step 2`, `steps 2-3, 101`; numbers: ascending."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"step{'s' * (len(numbers) > 1)} {', '.join(words)}"


# ----------------------------------------------------------------
# Numbers about speed: model-FLOPs utilisation (a share of the device's peak), and which device it was.

# Dense TFLOP/s in bf16 and fp16 of one device, from the makers' data sheets; the first name that fits counts.
_PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800 PCIe": 756.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The device's peak in FLOP/s; None if it is not known (every CPU, every dtype wider than 16 bits)."""
    if not is_accelerator(device) or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = name_of(device)
    return next((tera * 1e12 for key, tera in _PEAK_TFLOPS.items() if key in name), None)


def model_flops_utilisation(
    num_parameters: int | None, tokens_per_second: float | None, num_ranks: int, peak: float | None
) -> float | None:
    """Model-FLOPs utilisation by the usual 6 FLOPs per parameter and token; attention is not counted.

    peak: FLOP/s of one device. None if the peak is not known, if the data are no tokens, or if
    num_parameters is None, as for a model with experts, of which a token uses only some.
    """
    if peak is None or tokens_per_second is None or num_parameters is None:
        return None
    return 6 * num_parameters * tokens_per_second / (num_ranks * peak)


def machine(device: torch.device) -> dict[str, Any]:
    """What figures were measured on: device, threads of a process, versions of torch and Python."""
    cores = f"{os.cpu_count()} CPU cores ({torch.backends.cpu.get_cpu_capability()})"
    return {
        "device": name_of(device) if is_accelerator(device) else cores,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def sharing(device: torch.device) -> str:
    """`4 ranks share 2 CPU cores`; "" if each rank of this machine has a core, or computes on a GPU."""
    ranks, cores = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), os.cpu_count() or 1
    return f"{ranks} ranks share {cores} CPU cores" if device.type == "cpu" and ranks > cores else ""


def median(numbers: Sequence[float]) -> float:
    """The middle number; of an even count the larger of the two in the middle."""
    return sorted(numbers)[len(numbers) // 2]


# ----------------------------------------------------------------
# Figures beside the loss: MFU after each step, bubble and memory after a step that was measured.


class LiveFigures(Callback):
    """Adds figures to the metrics of each step on the rank that shows them; the other ranks need none.

    model_flops_utilisation is added if the data are tokens and the device's peak FLOP/s in this dtype are
    known. Steps that are measured action by action (Trainer.record_every) also get the figures of the latest
    measured steps (measured_steps.py), and peak_memory_bytes (of the fullest rank).
    """

    def __init__(self, here: World, dtype: torch.dtype) -> None:
        self._is_shown, self._num_processes = here.rank == 0, here.size
        self._peak = peak_flops(here.device, dtype)
        self._num_parameters: int | None = None  # those that each token uses
        self._is_counted = False
        self._last: int | None = None  # the measured step whose figures were added last

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Count the parameters, once. Collective."""
        if not self._is_counted:
            self._num_parameters = parameters_of_a_token(trainer.pipeline)
            self._is_counted = True

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Add the figures."""
        if not self._is_shown:
            return
        for metrics in known:
            utilisation = model_flops_utilisation(
                self._num_parameters,
                metrics.get("tokens_per_second"),
                self._num_processes,
                self._peak,
            )
            if utilisation is not None:
                metrics["model_flops_utilisation"] = utilisation
        newest = max(trainer.timelines, default=None)
        if known and newest is not None and newest != self._last:
            self._last = newest
            found = figures_of(trainer)
            known[-1] |= found.figures | {"peak_memory_bytes": max(found.measured.peak_memory)}


def parameters_in_all(pipeline: Pipeline) -> int:
    """The number of the model's parameters. Collective over the job."""
    return trained_and_all(pipeline)[1]


def trained_and_all(pipeline: Pipeline) -> tuple[int, int]:
    """How many of the model's parameters are trained, and how many there are. Collective over the job."""
    sizes = [(_numbers_in(each), each.requires_grad) for each in pipeline.counted_parameters()]
    own = sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)
    place = pipeline.place
    # Each replica counts its own, unless replicas share experts.
    copies = 1 if place.expert_groups else place.size(REPLICATE)
    trained, of_all = (sum(each) // copies for each in zip(*gather(own), strict=True))
    return trained, of_all


def _numbers_in(parameter: Tensor) -> int:
    """How many numbers this rank holds of it; bitsandbytes packs two of 4 bits into a byte."""
    of_4_bits = type(parameter).__name__ == "Params4bit"
    return 2 * parameter.nbytes if of_4_bits else local_of(parameter).numel()


def parameters_of_a_token(pipeline: Pipeline) -> int | None:
    """The number of parameters that each token uses; None for a model with experts. Collective."""
    have_experts = gather(has_experts(pipeline.stages.values()))
    number = parameters_in_all(pipeline)
    return None if any(have_experts) else number


# ----------------------------------------------------------------
# What a finished run was like: its last losses, its speed, its bubble predicted and measured.


class Title(NamedTuple):
    """The schedule that a run ended with, and the one that it began with if that was another."""

    schedule: str
    replanned_from: str | None = None

    def __str__(self) -> str:
        first = self.replanned_from
        return self.schedule if first is None else f"{self.schedule}, replanned from {first}"


class Summary(NamedTuple):
    """figures: the content of summary.json. sentences: what the run cost, and where a step's time went.

    measured: None if no step was measured.
    """

    figures: dict[str, Any]
    measured: MeasuredSteps | None
    sentences: list[str]


def summarise(
    title: Title,
    trainer: Trainer,
    history: Sequence[Mapping[str, Any]],
    here: World,
    dtype: torch.dtype,
    *,
    seconds: float,
) -> Summary:
    """Sum up a run. history: the metrics of its steps; seconds: how long they took in all. Collective."""
    unit = trainer.data.unit
    figures = {**title._asdict(), **_figures(trainer, history, here, dtype, seconds)}
    cost = sentence_of_cost(len(history), seconds, figures[unit], unit)
    if not trainer.timelines:
        return Summary(figures, None, [cost])
    found = figures_of(trainer)
    same = [each["step_seconds"] for each in history if each["step"] in trainer.timelines]
    link = link_waited_for(found, trainer.timelines.values())
    sentences = [cost, *sentences_of_time(found, median(same) * 1e3, figures["sharing"], link)]
    figures |= {
        **found.figures,
        "predicted_makespan_ms": found.predicted.makespan,
        "measured_makespan_ms": found.measured.makespan,
        "peak_memory_bytes": [int(peak) for peak in found.measured.peak_memory],
        "sentences": sentences,
    }
    return Summary(figures, found, sentences)


def _figures(
    trainer: Trainer,
    history: Sequence[Mapping[str, Any]],
    here: World,
    dtype: torch.dtype,
    seconds: float,
) -> dict[str, Any]:
    """The figures that need no measured step; arguments as in `summarise`. Collective."""
    pipeline, data, last = trainer.pipeline, trainer.data, history[-1] if history else {}
    steps = [metrics["step_seconds"] for metrics in history]
    items_per_second = trainer.filled_per_step / median(steps) if steps else None
    return {
        "num_processes": here.size,
        "num_ranks": pipeline.timetable.num_ranks,
        **{name: pipeline.place.dimensions.get(name, 1) for name in DIMENSIONS if name != PIPELINE},
        EXPERT: pipeline.place.size(EXPERT),
        "num_stages": pipeline.timetable.num_stages,
        "num_microbatches": pipeline.timetable.num_microbatches,
        "num_parameters": parameters_in_all(pipeline),
        "steps": trainer.next_step,
        "left": trainer.leaving,
        "skipped_steps": trainer.values.num_skipped,
        "non_finite_steps": trainer.values.num_non_finite,
        "seconds": seconds,
        data.unit: round(trainer.filled_per_step * len(history)),
        **{name: last[name] for name in last if name == "loss" or name.startswith("evaluation_")},
        f"{data.unit}_per_second": items_per_second,
        "model_flops_utilisation": model_flops_utilisation(
            parameters_of_a_token(pipeline),
            items_per_second if data.unit == "tokens" else None,
            here.size,
            peak_flops(here.device, dtype),
        ),
        **machine(here.device),
        "sharing": sharing(here.device),
    }


# ----------------------------------------------------------------
# What a run cost and where a step's time went, in sentences.

_LARGE_SHARE = 0.1  # of a step's time, for a link or outside the pipeline: worth a sentence


def sentence_of_cost(steps: int, seconds: float, items: int, unit: str) -> str:
    """How long the run took, and for how much work."""
    rate = f" ({items / seconds:,.0f} {unit} per second in all)" if seconds > 0 else ""
    return f"The run took {duration(seconds)} for {steps} steps and {items:,} {unit}{rate}."


def _ms(number: float) -> str:
    return f"{number:,.0f} ms" if number >= 100 else f"{number:.3g} ms"


def sentences_of_time(
    steps: MeasuredSteps, step_ms: float, shared: str = "", link: SlowestLink | None = None
) -> list[str]:
    """Where a step's time went. step_ms: how long the same steps took in all, their median.

    shared: see `sharing`. link: see `link_waited_for`.
    """
    measured, predicted = steps.measured, steps.predicted
    idle = f"{100 * measured.bubble_rate:.1f} %" + (f", while {shared}" if shared else "")
    found = [
        f"The pipeline's part of a step took {_ms(measured.makespan)} (the median of "
        f"{steps.steps}), of which the rank with the largest bubble was idle for {idle}; "
        f"simulated with the measured costs{' and the known links' if steps.costs.links else ''} "
        f"{_ms(predicted.makespan)} "
        f"and {100 * predicted.bubble_rate:.1f} %."
    ]
    if link is not None and link.saves > _LARGE_SHARE:
        found.append(f"{link} Both are simulated.")
    outside = 1 - measured.makespan / step_ms if step_ms > 0 else 0.0
    if outside > _LARGE_SHARE:
        found.append(
            f"A whole step took {_ms(step_ms)}, {100 * outside:.0f} % of it outside the pipeline: reading "
            "the batch, the norm, the optimizer."
        )
    return found


def duration(seconds: float) -> str:
    """`0:01:23`; below ten seconds `4.2 s`."""
    return f"{seconds:.1f} s" if seconds < 10 else str(timedelta(seconds=round(seconds)))

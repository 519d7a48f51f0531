"""What a finished run was like: its last losses, its speed, its bubble predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from zbpp.job.world import World
from zbpp.planning.advise import LEAST_GAIN, Advice, advise
from zbpp.runtime.memory.activation_offload import offload_plan_of
from zbpp.runtime.parallel.mesh import REPLICATE, SHARD, TENSOR
from zbpp.training.measured_steps import (
    MeasuredSteps,
    machine,
    measured_steps,
    median,
    model_flops_utilisation,
    parameters_in_all,
    peak_flops,
)
from zbpp.training.trainer import Trainer


class Title(NamedTuple):
    """The schedule that a run ended with, and the one that it began with if that was another."""

    schedule: str
    replanned_from: str | None = None

    def __str__(self) -> str:
        first = self.replanned_from
        return self.schedule if first is None else f"{self.schedule}, replanned from {first}"


class Summary(NamedTuple):
    """figures: the content of summary.json. sentences: the run's cost, and what would have made it faster.

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
    layers_per_stage: Sequence[int] | None = None,
) -> Summary:
    """Sum up a run. history: the metrics of its steps; seconds: how long they took in all. Collective."""
    pipeline, unit = trainer.pipeline, trainer.data.unit
    num_ranks = pipeline.timetable.num_ranks
    figures = {**title._asdict(), **_figures(trainer, history, here, dtype, seconds)}
    cost = sentence_of_cost(len(history), seconds, figures[unit], unit)
    if not trainer.timelines:
        return Summary(figures, None, [cost])
    found = measured_steps(trainer.timelines, offload_plan_of(pipeline))
    advice = advise(
        pipeline.timetable, found.costs, schedule=title.schedule, layers_per_stage=layers_per_stage
    )
    step_milliseconds = median([metrics["step_seconds"] for metrics in history]) * 1e3
    sentences = [
        cost,
        *sentences_of_time(found, step_milliseconds),
        *sentences_of_advice(advice, num_ranks),
    ]
    figures |= {
        **found.figures,
        "predicted_makespan_ms": found.predicted.makespan,
        "measured_makespan_ms": found.measured.makespan,
        "peak_memory_bytes": [int(peak) for peak in found.measured.peak_memory],
        "advice": [each._asdict() for each in advice],
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
    items_per_second = trainer.items_per_step / median(steps) if steps else None
    num_parameters = parameters_in_all(pipeline)
    return {
        "num_processes": here.size,
        "num_ranks": pipeline.timetable.num_ranks,
        **{name: pipeline.place.size(name) for name in (REPLICATE, SHARD, TENSOR)},
        "num_stages": pipeline.timetable.num_stages,
        "num_microbatches": pipeline.timetable.num_microbatches,
        "num_parameters": num_parameters,
        "steps": trainer.next_step,
        "left": trainer.leaving,
        "skipped_steps": trainer.values.num_skipped,
        "non_finite_steps": trainer.values.num_non_finite,
        "seconds": seconds,
        data.unit: trainer.items_per_step * len(history),
        **{name: last[name] for name in last if name == "loss" or name.startswith("evaluation_")},
        "unigram_entropy": data.unigram_entropy,
        f"{data.unit}_per_second": items_per_second,
        "model_flops_utilisation": model_flops_utilisation(
            num_parameters,
            items_per_second if data.unit == "tokens" else None,
            here.size,
            peak_flops(here.device, dtype),
        ),
        **machine(here.device),
    }


# ----------------------------------------------------------------
# What a run cost and what would have made it faster, in sentences.

_LARGE_SHARE = 0.1  # of a step's time outside the pipeline: worth a sentence
_SHOWN = 2  # pieces of advice


def sentence_of_cost(steps: int, seconds: float, items: int, unit: str) -> str:
    """How long the run took, and for how much work."""
    rate = f" ({items / seconds:,.0f} {unit} per second in all)" if seconds > 0 else ""
    return f"The run took {duration(seconds)} for {steps} steps and {items:,} {unit}{rate}."


def sentences_of_time(steps: MeasuredSteps, step_ms: float) -> list[str]:
    """Where a step's time went."""
    measured, predicted = steps.measured, steps.predicted
    found = [
        f"The pipeline's part of a step took {measured.makespan:.3g} ms (the median of "
        f"{steps.steps}), of which the rank with the largest bubble was idle for "
        f"{100 * measured.bubble_rate:.1f} %; simulated with the measured costs {predicted.makespan:.3g} ms "
        f"and {100 * predicted.bubble_rate:.1f} %."
    ]
    outside = 1 - measured.makespan / step_ms if step_ms > 0 else 0.0
    if outside > _LARGE_SHARE:
        found.append(
            f"{100 * outside:.0f} % of a step ({step_ms:.3g} ms) passed outside the pipeline: reading the "
            "batch, the norm, the optimizer."
        )
    return found


def sentences_of_advice(advice: Sequence[Advice], num_ranks: int) -> list[str]:
    """What would have made the steps faster."""
    if num_ranks == 1:
        return []
    if not advice:
        least = f"{100 * LEAST_GAIN:.0f} %"
        return [f"No other schedule, cut or number of microbatches that was tried gains {least} or more."]
    return [str(each) for each in advice[:_SHOWN]]


def duration(seconds: float) -> str:
    """`0:01:23`; below ten seconds `4.2 s`."""
    return f"{seconds:.1f} s" if seconds < 10 else str(timedelta(seconds=round(seconds)))

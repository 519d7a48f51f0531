"""What a run cost and what would have made it faster, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from zbpp.planning.advise import LEAST_GAIN, Advice
from zbpp.training.measured_steps import MeasuredSteps

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

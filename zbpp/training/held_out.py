"""An evaluation on the held-out batches: its means on every rank, and a line if one is not finite."""

from __future__ import annotations

from collections.abc import Sequence

from zbpp.runtime import Pipeline
from zbpp.training.batches import Batches
from zbpp.training.evaluation import (
    Counted,
    MetricsOf,
    Weighed,
    fault_of_evaluation,
    first_bad_batch,
    mean_of,
    sentence_of,
)
from zbpp.training.named_losses import with_evaluation_losses
from zbpp.training.update import Metrics


def evaluate_held_out(
    pipeline: Pipeline, batches: Batches, num_batches: int, metrics: MetricsOf | None, *, after_step: int
) -> Metrics:
    """`evaluation_loss`, and one for each of `metrics`: means over all held-out targets. Collective.

    {} without held-out batches. after_step: how many steps are done.
    """
    mine = [_means_of(pipeline, batches, metrics, number) for number in range(num_batches)]
    # Only the owners of the last stage have numbers.
    everyone = pipeline.place.gather(mine)
    found = mean_of(each for some in everyone for each in some if each.means)
    means = {f"evaluation_{name}": mean for name, mean in found.means.items()}
    fault = fault_of_evaluation(means)
    if fault:
        _tell_of_fault(pipeline, batches, fault, everyone, after_step)
    return means


def _means_of(pipeline: Pipeline, batches: Batches, metrics: MetricsOf | None, number: int) -> Weighed:
    """The means of loss and metrics of a held-out batch, where the last stage is; none on other ranks."""
    args, target = batches.of_evaluation(number)
    counted = Counted(metrics)
    losses, _ = pipeline.evaluate(*args, target=target, metrics=counted)
    num_targets, means = counted.with_losses(losses)
    means = with_evaluation_losses(means, pipeline.evaluation_losses)
    return Weighed(num_targets, means if losses else {})


def _tell_of_fault(
    pipeline: Pipeline, batches: Batches, fault: str, everyone: Sequence[Sequence[Weighed]], after_step: int
) -> None:
    """Print where a mean that is not finite comes from. everyone: each process's means of each batch."""
    number = first_bad_batch(everyone)
    place = pipeline.place
    told = place.gather(batches.fault_in_evaluation(number))
    if place.is_first and place.rank == 0:
        print(sentence_of(fault, after_step, number, next(filter(None, told), "")), flush=True)

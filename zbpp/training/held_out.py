"""An evaluation on the held-out batches: its means on every rank, and a line if one is not finite."""

from __future__ import annotations

from zbpp.runtime import Pipeline
from zbpp.training.batches import Batches
from zbpp.training.evaluation import (
    Counted,
    MetricsOf,
    Weighed,
    fault_of_evaluation,
    first_bad_batch,
    mean_of,
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
    if fault and pipeline.place.is_first and pipeline.place.rank == 0:
        print(
            f"NOT FINITE: after step {after_step}, {fault}. The first held-out batch with such a value is "
            f"number {first_bad_batch(everyone)}, counted from 0. This does not end the run",
            flush=True,
        )
    return means


def _means_of(pipeline: Pipeline, batches: Batches, metrics: MetricsOf | None, number: int) -> Weighed:
    """The means of loss and metrics of a held-out batch, where the last stage is; none on other ranks."""
    args, target = batches.of_evaluation(number)
    counted = Counted(metrics)
    losses, _ = pipeline.evaluate(*args, target=target, metrics=counted)
    num_targets, means = counted.with_losses(losses)
    means = with_evaluation_losses(means, pipeline.evaluation_losses)
    return Weighed(num_targets, means if losses else {})

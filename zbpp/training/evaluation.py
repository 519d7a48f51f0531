"""Means over held-out microbatches in which each target weighs the same.

A loss or metric of a microbatch is a mean over its targets. Where microbatches have different numbers of
targets, as conversations and padded rows do, the mean over all targets is not the mean over microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zbpp.data.source import num_rows
from zbpp.runtime import Pipeline
from zbpp.runtime.call.weights import Count
from zbpp.stage_api import num_tokens
from zbpp.training.batches import Batch, Batches
from zbpp.training.non_finite import text_of
from zbpp.training.optim.update import Metrics, with_evaluation_losses

MetricsOf = Callable[[Any, Any], Mapping[str, float | Tensor]]


class Weighed(NamedTuple):
    """Means over some data, and the number of targets in the data."""

    num_targets: float
    means: Mapping[str, float]


class Counted:
    """metrics(output, target) for `Pipeline.evaluate`; notes how many targets each microbatch has.

    count: as of `zbpp.stage_api.mean_over`, if the loss has one; its losses are weighed by it already.
    """

    def __init__(self, metrics: MetricsOf | None, count: Count | None = None) -> None:
        self._metrics, self._count = metrics, count
        self._seen: list[tuple[float, Mapping[str, float | Tensor]]] = []

    def __call__(self, output: Any, target: Any) -> Mapping[str, float | Tensor]:
        """The metrics of a microbatch."""
        found = {} if self._metrics is None else self._metrics(output, target)
        self._seen.append((float((self._count or num_targets)(target)), found))
        return found

    def with_losses(self, losses: Iterable[Tensor]) -> Weighed:
        """The means of losses and metrics over the batch's targets. Raises ValueError for a metric `loss`."""
        rows = [Weighed(count, {name: float(found[name]) for name in found}) for count, found in self._seen]
        if any("loss" in each.means for each in rows):
            raise ValueError("a metric is called 'loss', as the held-out loss is: give it another name")
        numbers = [*map(float, losses)]
        if not numbers:
            return mean_of(rows)
        weights = [1.0 if self._count else each.num_targets for each in rows]
        pairs = zip(weights, numbers, strict=True)
        _, loss = mean_of(Weighed(weight, {"loss": number}) for weight, number in pairs)
        total, means = mean_of(rows)
        return Weighed(total, {**loss, **means})


def num_targets(target: Any) -> float:
    """The number of targets over which a microbatch's loss is the mean.

    In labels (whole numbers) all but -100 are targets. For any other target it is the number of rows.
    """
    if isinstance(target, Tensor) and _is_whole(target):
        return float(num_tokens(target))
    sizes = (len(each) for each in tree_leaves(target) if isinstance(each, Tensor) and each.dim())
    return float(next(sizes, 1))


def mean_of(parts: Iterable[Weighed]) -> Weighed:
    """The means over all parts together. If no part has a target, all parts weigh alike."""
    rows = list(parts)
    total = math.fsum(each.num_targets for each in rows)
    weights = [each.num_targets / total if total else 1 / len(rows) for each in rows]
    names = rows[0].means if rows else ()
    means = {
        name: _sum([weight * each.means[name] for weight, each in zip(weights, rows, strict=True) if weight])
        for name in names
    }
    return Weighed(total, means)


def _is_whole(target: Tensor) -> bool:
    return not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)


def _sum(numbers: list[float]) -> float:
    """The sum, rounded once; inf or NaN if it is not finite, where math.fsum raises an error."""
    return math.fsum(numbers) if math.isfinite(sum(numbers)) else sum(numbers)


def fault_of_evaluation(means: Mapping[str, float]) -> str:
    """`evaluation_loss is NaN` for the first mean that is not finite; "" if all are."""
    bad = ((name, mean) for name, mean in means.items() if not math.isfinite(mean))
    return next((f"{name} is {text_of(mean)}" for name, mean in bad), "")


# ----------------------------------------------------------------
# An evaluation on the held-out batches: its means on every rank, and a line if one is not finite.


def evaluate_held_out(
    pipeline: Pipeline,
    batches: Batches,
    num_batches: int,
    num_rest: int,
    metrics: MetricsOf | None,
    *,
    after_step: int,
) -> Metrics:
    """`evaluation_loss`, and one for each of `metrics`: means over all held-out targets. Collective.

    num_rest: rows of all replicas together behind these batches. {} without held-out data. after_step: how
    many steps are done.
    """
    evaluated = partial(_means_of, pipeline, metrics)
    mine = [evaluated(batches.of_evaluation(number)) for number in range(num_batches)]
    if num_rest:
        parts = _parts_of_rest(pipeline, batches.of_evaluation(num_batches), num_rest)
        mine += [evaluated(part, is_counted=is_counted) for part, is_counted in parts]
    # Only the owners of the last stage have numbers.
    everyone = pipeline.place.gather(mine)
    found = mean_of(each for some in everyone for each in some if each.means)
    means = {f"evaluation_{name}": mean for name, mean in found.means.items()}
    fault = fault_of_evaluation(means)
    if fault and pipeline.place.is_first and pipeline.place.rank == 0:
        print(f"NOT FINITE: after step {after_step}, {fault}. This does not end the run", flush=True)
    return means


def _means_of(
    pipeline: Pipeline, metrics: MetricsOf | None, batch: Batch, *, is_counted: bool | None = None
) -> Weighed:
    """The means of loss and metrics of a held-out batch, where the last stage is; none on other ranks.

    is_counted: None: of a whole batch; else of one microbatch, and False leaves its means out.
    """
    args, target = batch
    counted = Counted(metrics, pipeline.count)
    evaluate = pipeline.evaluate if is_counted is None else pipeline.evaluate_as_one
    losses, _ = evaluate(*args, target=target, metrics=counted)
    num_targets, means = counted.with_losses(losses)
    means = with_evaluation_losses(means, pipeline.evaluation_losses)
    return Weighed(num_targets, means if losses and is_counted is not False else {})


def _parts_of_rest(pipeline: Pipeline, batch: Batch, num_rest: int) -> Iterator[tuple[Batch, bool]]:
    """The held-out rows that fill no whole batch, a microbatch at a time, and whether they are counted.

    batch: this process's, which has some of the rows at its beginning. Replicas run together, so one with
    fewer rows than another runs a row of its batch that is not counted. Collective.
    """
    place = pipeline.place
    batch_size = max(place.gather(num_rows(batch) or 0))
    size = max(1, batch_size // pipeline.timetable.num_microbatches)
    own = num_rest - place.data_part * batch_size
    for first in range(0, min(num_rest, batch_size), size):
        rows = range(first, min(first + size, own))
        yield _rows_of(batch, rows or range(1)), bool(rows)


def _rows_of(batch: Batch, rows: range) -> Batch:
    """Some rows of a batch."""
    size = num_rows(batch)

    def cut(value: Any) -> Any:
        is_split = isinstance(value, Tensor) and value.dim() and len(value) == size
        return value[rows.start : rows.stop] if is_split else value

    rows_of: Batch = tree_map(cut, batch)
    return rows_of

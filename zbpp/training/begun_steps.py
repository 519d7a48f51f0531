"""Steps whose outcome is not known yet. With post-validation an outcome is known one step later."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

from zbpp.runtime import NonFinite, Pipeline, find_non_finite
from zbpp.training.batches import Batch
from zbpp.training.non_finite import Values
from zbpp.training.optim.update import Metrics, Outcome, with_named_losses


class _Begun(NamedTuple):
    """step: counted from 1. batch: to run the step again. number: the pipeline's, counted from 0."""

    step: int
    times: Metrics
    batch: Batch
    number: int


class BegunSteps:
    """Turns the outcomes of steps, oldest first, into metrics. values: judges the outcomes."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._begun: deque[_Begun] = deque()

    @property
    def kept_batches(self) -> list[Batch]:
        """The batches of the steps whose outcome is not known yet: such a step may be run again."""
        return [begun.batch for begun in self._begun]

    def add(self, step: int, times: Metrics, batch: Batch, pipeline: Pipeline) -> None:
        """Note the step (counted from 0) that the pipeline has just run. times: its duration and speed."""
        self._begun.append(_Begun(step + 1, times, batch, pipeline.num_steps - 1))

    def finish(self, outcome: Outcome, figures: Metrics, pipeline: Pipeline) -> Metrics:
        """The metrics of the oldest step, whose outcome has become known."""
        begun = self._begun.popleft()
        metrics = {"step": begun.step, "loss": outcome.loss, **figures, **begun.times}
        metrics = with_named_losses(metrics, outcome.named)
        self._values.judge(outcome, metrics, partial(self._find_non_finite, begun, pipeline))
        return metrics

    def _find_non_finite(self, begun: _Begun, pipeline: Pipeline) -> NonFinite | None:
        """Run a step again. With post-validation the weights may have the next step's update already."""
        args, target = begun.batch
        return find_non_finite(pipeline, *args, target=target, step=begun.number)

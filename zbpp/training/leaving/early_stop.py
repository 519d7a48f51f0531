"""A run that ends when a metric of its evaluations improves no more."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zbpp.training.callbacks import Callback
from zbpp.training.update import Metrics

if TYPE_CHECKING:
    from zbpp.training.trainer import Trainer


class MetricError(ValueError):
    """The metric to watch is not among those of an evaluation."""


class EarlyStop(Callback):
    """Ends the run after `patience` evaluations in a row without a better value of `metric`.

    A value is better if it is smaller than the best one by more than min_delta; with mode="max", larger.
    NaN is never better. Evaluations are equal on all ranks, so all ranks decide alike.
    Raises MetricError at the first evaluation that has no such metric.
    """

    def __init__(self, metric: str, *, patience: int = 3, min_delta: float = 0.0, mode: str = "min") -> None:
        self.metric, self.patience, self.min_delta, self.mode = metric, patience, min_delta, mode
        self.best: float | None = None
        self.best_step = self.num_without_better = 0

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Compare an evaluation with the best one."""
        found = [name for name in (known[-1] if known else {}) if name.startswith("evaluation_")]
        if not found:
            return
        if self.metric not in found:
            raise MetricError(
                f"early_stop.metric={self.metric}: an evaluation has {', '.join(found)}: write one of them"
            )
        value = float(known[-1][self.metric])
        if self._is_better(value):
            self.best, self.best_step, self.num_without_better = value, known[-1]["step"], 0
            return
        self.num_without_better += 1
        if self.num_without_better >= self.patience:
            best = "it was never a number" if self.best is None else f"{self.best:g} at step {self.best_step}"
            times = f"{self.patience} evaluations" if self.patience > 1 else "one evaluation"
            trainer.leave(f"{self.metric} improved no more in {times}; best: {best}", agreed=True)

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, float | int | None]:
        """What a resumed run needs to go on counting."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "num_without_better": self.num_without_better,
        }

    def load_state_dict(self, state: dict[str, float | int | None]) -> None:
        """Go on from a `state_dict`."""
        self.best = state["best"]
        self.best_step = int(state["best_step"] or 0)
        self.num_without_better = int(state["num_without_better"] or 0)

"""A run that is left after a given number of steps, as a signal would make it leave."""

from __future__ import annotations

from zbpp.training.callbacks import Callback
from zbpp.training.trainer import Trainer
from zbpp.training.update import Metrics


class StopAfter(Callback):
    """Leaves the run after `num_steps` steps, counted from this start; a later start may go on."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._num_done = num_steps, 0

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Count the step."""
        self._num_done += 1
        if self._num_done == self._num_steps:
            trainer.leave(f"stop_after={self._num_steps}", agreed=True)

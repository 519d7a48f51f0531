"""Leaving after some steps of this start, as a signal would make a run leave."""

from __future__ import annotations

from zbpp.training.callbacks import Callback
from zbpp.training.trainer import Trainer
from zbpp.training.update import Metrics


class StopAfter(Callback):
    """Ends a run after so many steps of this start; a later start may go on."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._num_done = num_steps, 0

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Count the step."""
        self._num_done += 1
        if self._num_done == self._num_steps:
            trainer.leave(f"stop_after={self._num_steps}", agreed=True)

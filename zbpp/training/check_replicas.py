"""Copies of weights, buffers and optimizer states compared every so many steps of a run."""

from __future__ import annotations

from zbpp.runtime import check_replicas
from zbpp.training.callbacks import Callback
from zbpp.training.trainer import Trainer
from zbpp.training.update import Metrics


class CheckReplicas(Callback):
    """Compares all copies after every `every`-th step, and after the last step."""

    def __init__(self, every: int) -> None:
        self._every = every

    def needs_weights(self, step: int) -> bool:
        """See Callback."""
        return (step + 1) % self._every == 0

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """See Callback."""
        if self.needs_weights(step):
            check_replicas(trainer.pipeline, trainer.optimizer, masters=trainer.masters)

    def finish(self, trainer: Trainer) -> None:
        """See Callback."""
        if trainer.next_step % self._every:
            check_replicas(trainer.pipeline, trainer.optimizer, masters=trainer.masters)

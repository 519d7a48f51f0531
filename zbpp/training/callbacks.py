"""Callbacks that come with zbpp: compare copies, and profile.

trainer.py says what a callback is, and when its methods are called.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from zbpp.observers.recorder import ProfilerNames
from zbpp.observers.replicas import check_replicas
from zbpp.training.optim.update import Metrics
from zbpp.training.trainer import Callback, Trainer

__all__ = ["Callback", "CheckReplicas", "Profile"]


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


# ----------------------------------------------------------------
# torch.profiler over some steps, with the actions of the timetable by their names: `2F5`.


class Profile(Callback):
    """Profiles this rank in `steps`, counted from 1, and writes `path` after the last of them.

    The file is a Chrome trace, for ui.perfetto.dev. A run that ends earlier writes what there is.
    """

    def __init__(self, steps: range, path: Path) -> None:
        self._steps, self._path = steps, path
        self._profiler: torch.profiler.profile | None = None
        self._names = ExitStack()

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Begin with the first step of the range."""
        if step + 1 not in self._steps or self._profiler is not None:
            return
        self._names.enter_context(trainer.pipeline.using(ProfilerNames()))
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """End after the last step of the range."""
        if step + 1 >= self._steps[-1]:
            self.finish(trainer)

    def finish(self, trainer: Trainer) -> None:
        """End, if the run ends inside the range."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._path))
        self._names.close()
        self._profiler = None

"""What happens around the steps of a run beside training: saving, leaving early, sampling, profiling.

    for each step:    before_step   the step   after_step
    at the end:       finish        if the run does its last step, or is left early
                      stopped       if NaN or infinite values stop the run
                      (neither)     if the run fails

All ranks have the same callbacks in the same order, and call them at the same places: so a callback may
communicate.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zbpp.checkpoints import Stateful
from zbpp.runtime import check_replicas
from zbpp.runtime.measure import ProfilerNames
from zbpp.training.optim.update import Metrics

if TYPE_CHECKING:
    from zbpp.training.trainer import Trainer


class Callback:
    """The base of all callbacks; each method does nothing until it is overridden. Steps count from 0."""

    def seconds_to_finish(self, trainer: Trainer) -> float:
        """This callback's estimate of how long `finish` takes; a time limit ends the run so much earlier."""
        return 0.0

    def needs_weights(self, step: int) -> bool:
        """Whether `after_step` of this step needs the final weights and this step's metrics.

        With post-validation both are known during the next step only, unless the trainer waits for them.
        """
        return False

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Called before a step reads its batch."""

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """Called after a step.

        known: the metrics of the steps whose outcome has become known, oldest first. The callback may add
        entries to these dicts. If `needs_weights(step)` is true, the last dict is this step's.
        """

    def stopped(self, trainer: Trainer) -> None:
        """Called instead of `finish` on all ranks if values that are not finite stop the run."""

    def finish(self, trainer: Trainer) -> None:
        """Called once after the last step, whose number is `trainer.next_step - 1`."""


def states_of(callbacks: Iterable[Callback]) -> dict[str, Stateful]:
    """The callbacks with a state, by their names in a checkpoint: `callback.Count`, `callback.Count#2`."""
    found: dict[str, Stateful] = {}
    for callback in callbacks:
        if isinstance(callback, Stateful):
            name = f"callback.{type(callback).__name__}"
            number = sum(each.partition("#")[0] == name for each in found)
            found[f"{name}#{number + 1}" if number else name] = callback
    return found


def call_each(trainer: Trainer, method: str, *args: Any) -> None:
    """Call this method of each callback of the trainer."""
    for callback in trainer.callbacks:
        getattr(callback, method)(trainer, *args)


# ----------------------------------------------------------------
# Copies of weights, buffers and optimizer states compared every so many steps of a run.


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

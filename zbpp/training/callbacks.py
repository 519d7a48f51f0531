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
from typing import TYPE_CHECKING

from zbpp.checkpoints import Stateful
from zbpp.training.update import Metrics

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

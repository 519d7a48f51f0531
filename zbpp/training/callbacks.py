"""What happens around the steps of a run beside training: saving, leaving early, sampling, profiling.

    for each step:    before_step   the step   after_step
    at the end:       finish        if the run does its last step, or is left early
                      stopped       if NaN or infinite values stop the run
                      (neither)     if the run fails

All ranks have the same callbacks in the same order, and call them at the same places: so a callback may
communicate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zbpp.checkpoints import Stateful
from zbpp.error_text import kind_of
from zbpp.runtime import check_replicas
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


class CallbackError(ValueError):
    """A mistake in a user's callback."""


def call_each(trainer: Trainer, method: str, *args: Any) -> None:
    """Call this method of each callback of the trainer."""
    for callback in trainer.callbacks:
        getattr(callback, method)(trainer, *args)


def after_step(trainer: Trainer, step: int, known: list[Metrics]) -> None:
    """Call `after_step` of each callback. Raises CallbackError for a metric that JSON can't hold.

    A tensor with one element becomes a number.
    """
    for callback in trainer.callbacks:
        before = [set(metrics) for metrics in known]
        callback.after_step(trainer, step, known)
        for metrics, old in zip(known, before, strict=True):
            for key in metrics.keys() - old:
                metrics[key] = _checked(type(callback).__name__, key, metrics[key])


def _checked(name: str, key: Any, value: Any) -> Any:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and all(size == 1 for size in shape) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value  # NaN and infinity are written as texts
    try:
        json.dumps({key: value}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        kind = kind_of(value) + (f" of shape {list(shape)}" if shape is not None else "")
        raise CallbackError(
            f"callback {name} sets {key!r} in the metrics to {kind}, which metrics.jsonl can't hold "
            f"({error}): write a number, a text, or a tensor with one element"
        ) from None
    return value


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

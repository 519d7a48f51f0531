"""Checks against silent corruption, as callbacks of a run: see zbpp/runtime/pipeline_checks.py."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from zbpp.runtime.world import gather
from zbpp.training.callbacks import Callback
from zbpp.training.trainer import Trainer
from zbpp.training.update import Metrics


class CheckReplicas(Callback):
    """Compares all copies of weights, buffers and optimizer states.

    It does so after the first step of a start, after every `every`-th step, and after the last step.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._first: int | None = None
        self._compared: int | None = None  # how many steps were done at the last comparison

    def before_step(self, trainer: Trainer, step: int) -> None:
        """See Callback."""
        self._first = step if self._first is None else self._first

    def needs_weights(self, step: int) -> bool:
        """See Callback."""
        return step == self._first or (step + 1) % self._every == 0

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """See Callback."""
        if self.needs_weights(step):
            self._check(trainer)

    def finish(self, trainer: Trainer) -> None:
        """See Callback."""
        if self._compared != trainer.next_step:
            self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        trainer.pipeline.check_replicas(trainer.optimizer, masters=trainer.masters)
        self._compared = trainer.next_step


class ReplaySteps(Callback):
    """Runs the first step of a start and every `every`-th step twice; not one whose memory is reported."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._open = ExitStack()
        self._is_first = True

    def needs_weights(self, step: int) -> bool:
        """Whether the next step runs twice: the update before it must be validated by then."""
        return (step + 2) % self._every == 0

    def before_step(self, trainer: Trainer, step: int) -> None:
        """See Callback."""
        report = trainer.memory_report
        if (self._is_first or (step + 1) % self._every == 0) and not (report and report.step == step):
            self._open.enter_context(trainer.pipeline.replaying())
        self._is_first = False

    def after_step(self, trainer: Trainer, step: int, known: list[Metrics]) -> None:
        """See Callback."""
        self._open.close()


def checks_done(names: Collection[str], trainer: Trainer) -> dict[str, int]:
    """How often each of these checks found everything equal in this start of a run. Collective over the job.

    replay: steps; replicas: comparisons of copies; messages: those of all ranks together.
    """
    counts = trainer.pipeline.check_counts
    every = {"replay": counts.replay, "replicas": counts.replicas, "messages": sum(gather(counts.messages))}
    return {name: number for name, number in every.items() if name in names}


def sentence_of_checks(done: dict[str, int]) -> str:
    """`checks: replay once, messages 1,204 times: equal; replicas: nothing to compare`."""
    equal = [
        f"{name} {'once' if number == 1 else f'{number:,} times'}" for name, number in done.items() if number
    ]
    idle = [f"{name}: nothing to compare" for name, number in done.items() if not number]
    return f"checks: {'; '.join([*([', '.join(equal) + ': equal'] if equal else []), *idle])}"

"""The bytes that a rank holds before, during and after each action of one step, and what outlives the step.

    record = MemoryRecord(pipeline.device)
    with record.step(static), pipeline.using(record.recorder):
        pipeline.step(x, target=y)

A dispatch mode counts (live_tensors.py) the tensors that the caller names (`static`) and those that operators
return during the step, but not the memory that an operator allocates for itself and frees.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zbpp.autograd.storages import storages_of
from zbpp.features.post_validation.validation import Validation
from zbpp.features.weight_offload.weight_offload import OffloadedWeights
from zbpp.measure.live_tensors import Counter, LiveTensors, counter_of
from zbpp.observers.record import StepRecord
from zbpp.observers.recorder import Recorder
from zbpp.runtime import Pipeline
from zbpp.runtime.extra import extras_of
from zbpp.schedule import Action
from zbpp.schedule.program import Instruction, PartOfW
from zbpp.training.trainer import Trainer


class Span(NamedTuple):
    """The bytes before and after an action. highest: the most from its begin to the next action's begin."""

    action: Action
    before: int
    highest: int
    after: int


class MemoryLevels(StepRecord):
    """A record of the bytes held, where a plain StepRecord has the times."""

    def __init__(self, device: torch.device, counter: Counter) -> None:
        super().__init__(device)
        self._counter, self._levels = counter, list[tuple[int, int]]()
        self._of: Sequence[Instruction | None] = ()

    def begin(self, instructions: Sequence[Instruction | None]) -> Callable[[], None]:
        """Start a new record. The returned function notes the level, and the highest since its last call."""
        self._of, self._levels = instructions, []
        levels, counter = self._levels, self._counter
        counter.mark()

        def mark() -> None:
            levels.append((counter.now, counter.highest))
            counter.mark()

        return mark

    def reduction(self, stage: int) -> Callable[[], None]:
        """Reductions are not recorded."""
        return lambda: None

    def spans(self) -> Iterator[Span]:
        """The levels of each action. What happens after an action counts for its `highest`."""
        pairs = zip(self._levels[::2], self._levels[1::2], strict=True)
        last: Span | None = None
        for instruction, ((before, waited), (after, highest)) in zip(self._of, pairs, strict=True):
            is_action = isinstance(instruction, Action)
            if last is not None:
                last = last._replace(highest=max(last.highest, waited, 0 if is_action else highest))
            if last is not None and isinstance(instruction, PartOfW):  # it belongs to the B before it
                last = last._replace(after=after)
            if isinstance(instruction, Action):
                if last is not None:
                    yield last
                last = Span(instruction, before, highest, after)
        if last is not None:
            yield last


class MemoryRecord:
    """One step's memory. The attributes are filled when the step has ended.

    spans: the levels of each action. highest: the most bytes at any time of the step. outliving: the bytes
    that were allocated in the step and outlive it; not counted on CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._counter = counter_of(device)
        self._levels = MemoryLevels(device, self._counter)
        self.recorder = Recorder(self._levels)
        self.spans: list[Span] = []
        self.highest = self.outliving = 0

    def count(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors of this step that no operator returned (the batch). CUDA's allocator counts all."""
        self._counter.count(tensors)

    @contextmanager
    def step(
        self,
        static: Callable[[], Iterable[Tensor]],
        on_host: Callable[[], Iterable[Tensor]] = tuple,
    ) -> Iterator[None]:
        """Record the step that runs within this context.

        static(): the tensors that stay from step to step: weights, gradients, optimizer states, buffers.
        on_host(): tensors in host memory, which don't count.
        """
        with self._counter as counter:
            counter.ignore(on_host())
            counter.count(static())
            before = counter.now
            yield
            gc.collect()
            after = counter.now
        self.spans = list(self._levels.spans())
        if isinstance(counter, LiveTensors):
            staying = {storage._cdata for each in (*static(), *on_host()) for storage in storages_of(each)}
            self.outliving = sum(each.nbytes() for each in counter.alive() if each._cdata not in staying)
        self.highest = max([before, after, *(each.highest for each in self.spans)])


# ----------------------------------------------------------------
# The memory of one step of a Trainer.


class Report(NamedTuple):
    """One rank's measured step, in bytes: see MemoryRecord.

    is_validated_later: whether the step had a gate, where the previous update was validated.
    """

    spans: list[Span]
    highest: int
    outliving: int
    is_validated_later: bool


def last_step_of(trainer: Trainer, num_steps: int) -> Report:
    """Run the trainer; the memory of its last step, of which it must not record the times."""
    pipeline, record = trainer.pipeline, MemoryRecord(trainer.pipeline.device)
    read, run, gates, is_recording = trainer._batches.of_step, trainer._step, list[bool](), False

    def of_step(number: int) -> Any:
        batch = read(number)
        if is_recording:  # no operator made the batch
            record.count(each for each in tree_leaves(batch) if isinstance(each, Tensor))
        return batch

    def step(number: int) -> Any:
        nonlocal is_recording
        is_recording = number == num_steps - 1
        if not is_recording:
            return run(number)
        validations = (each for each in pipeline.extras if isinstance(each, Validation))
        gates.append(any(each.pending is not None for each in validations))
        static, on_host = partial(_staying, trainer), partial(_on_host, pipeline, trainer.optimizer)
        with record.step(static, on_host), pipeline.using(record.recorder):
            return run(number)

    trainer._batches.of_step, trainer._step = of_step, step
    list(trainer.run(num_steps))
    return Report(record.spans, record.highest, record.outliving, gates[0])


def _offloaded(pipeline: Pipeline) -> OffloadedWeights | None:
    return next(
        (each for each in extras_of(pipeline.stages.values()) if isinstance(each, OffloadedWeights)), None
    )


def _staying(trainer: Trainer) -> Iterator[Tensor]:
    """On the device: what may be redone, receive buffers, weights, gradients, masters, optimizer states."""
    pipeline = trainer.pipeline
    kept = trainer._update.copies(), [each.batch for each in trainer._begun._begun]
    yield from (each for each in tree_leaves(kept) if isinstance(each, Tensor))
    weights = _offloaded(pipeline)
    yield from pipeline._rank.executors["step"].pool.buffers()
    yield from (pipeline.released or {}).values()
    if weights is not None:
        yield from weights.on_device()
        yield from (each for stage in pipeline.stages.values() for each in stage.buffers())
        return
    for stage in pipeline.stages.values():
        for each in (*stage.parameters(), *stage.buffers()):
            found = each, each.grad, getattr(each, "main_grad", None)
            yield from (tensor for tensor in found if tensor is not None)
    if trainer.masters is not None:
        yield from trainer.masters.parameters()
    yield from _states(trainer.optimizer)


def _on_host(pipeline: Pipeline, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All tensors that live in host memory."""
    weights = _offloaded(pipeline)
    if weights is not None:
        for each in pipeline.parameters():
            yield from (each,) if each.grad is None else (each, each.grad)
        yield from _states(optimizer)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))

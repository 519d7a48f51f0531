"""The bytes that a rank holds before, during and after each action of one step, and what outlives the step.

    record = MemoryRecord(pipeline.device)
    with record.step(static), pipeline.using(record.recorder):
        pipeline.step(x, target=y)

On CUDA the allocator's figures are taken. On the CPU a dispatch mode counts (live_tensors.py): it counts the
tensors that the caller names (`static`) and those that operators return during the step, but not the memory
that an operator allocates for itself and frees.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from zbpp.autograd.storages import storages_of
from zbpp.runtime.measure import Recorder, StepRecord
from zbpp.runtime.measure.live_tensors import Counter, LiveTensors, counter_of
from zbpp.schedule import Action
from zbpp.schedule.lower import Instruction


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
            if isinstance(instruction, Action):
                if last is not None:
                    yield last
                last = Span(instruction, before, highest, after)
        if last is not None:
            yield last


class MemoryRecord:
    """One step's memory. The attributes are filled when the step has ended.

    spans: the levels of each action. before, after: the bytes before and after the whole step. highest: the
    most at any time of the step. outliving: the bytes that were allocated in the step and outlive it; not
    counted on CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._counter = counter_of(device)
        self._levels = MemoryLevels(device, self._counter)
        self.recorder = Recorder(self._levels)
        self.spans: list[Span] = []
        self.before = self.after = self.highest = self.outliving = 0

    @property
    def how(self) -> str:
        """How the bytes were counted, in words."""
        is_counted = isinstance(self._counter, LiveTensors)
        return "a count of live tensors on the CPU" if is_counted else "the CUDA allocator"

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
            self.before = counter.now
            yield
            gc.collect()
            self.after = counter.now
        self.spans = list(self._levels.spans())
        if isinstance(counter, LiveTensors):
            staying = {storage._cdata for each in (*static(), *on_host()) for storage in storages_of(each)}
            self.outliving = sum(each.nbytes() for each in counter.alive() if each._cdata not in staying)
        self.highest = max([self.before, self.after, *(each.highest for each in self.spans)])

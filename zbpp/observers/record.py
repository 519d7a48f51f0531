"""When each instruction of one rank ran, in the step that was recorded last."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zbpp.runtime.extra import Background
from zbpp.schedule import Action, Recv, Send, Value
from zbpp.schedule.program import Instruction, PartOfW
from zbpp.streams import Event, streams_of

Times = npt.NDArray[np.float64]
Messages = tuple[dict[Value, float], dict[Value, float]]  # sent by a rank, arrived there: ms
Copies = list[tuple[Value, bool, float, float]]  # value, whether it leaves the device, start, end: ms
Spans = list[tuple[int, float, float]]  # stage, start, end: ms
Mark = Any  # a time in ms, or an Event


class Clock:
    """Sets marks on a device, and reads them.

    A mark is the host's time; on a GPU, an event in the current stream. Setting a mark waits for nothing.
    Reading the first events of a step waits for the device, once: by then all events have passed, and one
    more event ties the device's time to the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._end: tuple[float, Event] | None = None  # one moment after the step, by both clocks

    def begin(self) -> None:
        """Begin a step: the marks of the previous one will not be read any more."""
        self._end = None

    def mark(self) -> Mark:
        """A mark of this moment; on a GPU, of the moment at which the current stream gets here."""
        return _now() if self._streams is None else self._streams.mark()

    def in_ms(self, marks: Sequence[Mark]) -> list[float]:
        """Marks in ms of the host's clock (CLOCK_MONOTONIC), which all processes of a machine share."""
        if self._streams is None:
            return [*marks]
        if self._end is None:
            self._streams.synchronize()
            event = self._streams.mark()  # the device is idle: it comes to this event at once
            event.synchronize()
            self._end = _now(), event
        now, end = self._end
        return [now - mark.elapsed_time(end) for mark in marks]


def _now() -> float:
    return time.perf_counter() * 1e3


class StepRecord:
    """When each instruction of a rank began and ended in its last recorded step, in ms.

    Measured by CUDA events on a GPU: a recorded step waits for nothing, and whoever reads the times first
    waits for the device, once. On the CPU measured by the machine's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._clock = device, Clock(device)
        self._marks: list[Mark] = []
        self._instructions: Sequence[Instruction | None] = ()
        self._reduced: list[tuple[int, Mark, Mark]] = []  # stage, begin, end; in the order of the ends
        self._copied: list[tuple[Value, bool, Mark, Mark]] = []  # value, is_out, begin, end
        self._waited: list[tuple[int, Mark, Mark]] = []  # position of the instruction, begin, end

    @property
    def is_empty(self) -> bool:
        """Whether no step was recorded yet."""
        return not self._marks

    def begin(self, instructions: Sequence[Instruction | None]) -> Callable[[], None]:
        """Start a new record of these instructions, which replaces the last one.

        Returns a function to be called where an instruction begins, and again where it ends, in their order.
        None stands for work that is no instruction. The sequence may still grow.
        """
        marks: list[Mark] = []
        self._instructions, self._marks, self._reduced, self._copied = instructions, marks, [], []
        self._waited = []
        self._clock.begin()
        mark = self._clock.mark
        return lambda: marks.append(mark())

    def reduction(self, stage: int) -> Callable[[], None]:
        """Note that a stage's reduction starts; return a function to be called when it has ended.

        The function may be called by another thread. On a GPU both calls belong into the stream whose work
        they mark. A reduction whose function is never called is not recorded.
        """
        mark = self._clock.mark
        reduced, begin = self._reduced, mark()
        return lambda: reduced.append((stage, begin, mark()))

    def exchange(self) -> Callable[[], None]:
        """Note that the instruction waits for an exchange; returns a function to be called at its end."""
        mark, waited, position = self._clock.mark, self._waited, len(self._marks) // 2
        begin = mark()
        return lambda: waited.append((position, begin, mark()))

    def copy(self, value: Value, *, is_out: bool) -> Background:
        """What notes a copy of a value: see Background; called by another thread, or in a CUDA stream."""
        mark, copied = self._clock.mark, self._copied

        def begin() -> Callable[[], None]:
            start = mark()
            return lambda: copied.append((value, is_out, start, mark()))

        return begin

    def times(self) -> Times:
        """[actions, 2]: start and end of each action in ms of the clock; a PartOfW belongs to its B."""
        spans: list[tuple[float, float]] = []
        for instruction, (begin, end) in self._spans():
            if isinstance(instruction, Action):
                spans.append((begin, end))
            elif isinstance(instruction, PartOfW):
                spans[-1] = spans[-1][0], end
        return np.array(spans, dtype=np.float64).reshape(-1, 2)

    def messages(self) -> Messages:
        """When the send of each message from here began, and when each message to here had arrived.

        In ms of the machine's clock.
        """
        spans = list(self._spans())
        sent = {each.value: begin for each, (begin, _) in spans if isinstance(each, Send)}
        arrived = {each.value: end for each, (_, end) in spans if isinstance(each, Recv)}
        return sent, arrived

    def reductions(self) -> Spans:
        """Each stage with the begin and end of its reduction in ms of the machine's clock, by their ends."""
        stages, begins, ends = zip(*self._reduced, strict=True) if self._reduced else ((), (), ())
        spans = zip(stages, self._clock.in_ms(begins), self._clock.in_ms(ends), strict=True)
        return sorted(spans, key=lambda span: span[2])

    def copies(self) -> Copies:
        """Each value that was copied, whether out of the device, with begin and end, in order."""
        values, are_out, begins, ends = zip(*self._copied, strict=True) if self._copied else ((),) * 4
        in_ms = self._clock.in_ms
        return [*zip(values, are_out, in_ms(begins), in_ms(ends), strict=True)]

    def exposed(self) -> Times | None:
        """For each action how long it waited for exchanges, in ms; None if no instruction waited for one."""
        if not self._waited:
            return None
        positions, begins, ends = zip(*self._waited, strict=True)
        waited = np.zeros(len(self._instructions))
        np.add.at(waited, [*positions], np.subtract(self._clock.in_ms(ends), self._clock.in_ms(begins)))
        return waited[[isinstance(each, Action) for each in self._instructions]]

    def _spans(self) -> Iterator[tuple[Instruction | None, tuple[float, float]]]:
        """Each instruction with its begin and end."""
        marks = self._clock.in_ms(self._marks)
        return zip(self._instructions, zip(marks[::2], marks[1::2], strict=True), strict=True)

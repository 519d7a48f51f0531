"""When something ran: marks that are set while a step runs, and read as times after it.

A mark is the host's time; on a GPU, an event in the current stream. Setting a mark waits for nothing. Reading
the first events of a step waits for the device, once: by then all events have passed, and one more event ties
the device's time to the host's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from zbpp.streams import Event, streams_of

Mark = Any  # a time in ms, or an Event


class Clock:
    """Sets marks on a device, and reads them."""

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

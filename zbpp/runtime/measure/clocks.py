"""When something ran: marks that are set while a step runs, and read as times after it.

    HostClock      a mark is the host's time
    StreamClock    a mark is an event in the device's current stream

Setting a mark waits for nothing. Reading the first mark of a step waits for the device, once: by then all
events have passed, and one more event ties the device's time to the host's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from zbpp.streams import Event, Streams, streams_of


class Clock(Protocol):
    """Sets marks, and reads them."""

    def begin(self) -> None:
        """Begin a step: the marks of the previous one will not be read any more."""

    def mark(self) -> Any:
        """A mark of this moment; on a GPU, of the moment at which the current stream gets here."""

    def in_ms(self, marks: Sequence[Any]) -> list[float]:
        """Marks in ms of the host's clock (CLOCK_MONOTONIC), which all processes of a machine share."""


class HostClock:
    """The time at which the host comes to a mark."""

    def begin(self) -> None:
        """See Clock."""

    def mark(self) -> float:
        """See Clock."""
        return _now()

    def in_ms(self, marks: Sequence[float]) -> list[float]:
        """See Clock."""
        return [*marks]


class StreamClock:
    """The time at which a stream of the device comes to a mark."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._end: tuple[float, Event] | None = None  # one moment after the step, by both clocks

    def begin(self) -> None:
        """See Clock."""
        self._end = None

    def mark(self) -> Event:
        """See Clock."""
        return self._streams.mark()

    def in_ms(self, marks: Sequence[Event]) -> list[float]:
        """See Clock. Waits for the device when it is called first in a step."""
        if self._end is None:
            self._streams.synchronize()
            event = self._streams.mark()  # the device is idle: it comes to this event at once
            event.synchronize()
            self._end = _now(), event
        now, end = self._end
        return [now - mark.elapsed_time(end) for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    streams = streams_of(device)
    return HostClock() if streams is None else StreamClock(streams)


def _now() -> float:
    return time.perf_counter() * 1e3

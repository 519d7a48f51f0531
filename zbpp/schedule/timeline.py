"""A timeline: when each action of a timetable ran, and each message, predicted or measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.schedule.costs import ACTIVATIONS
from zbpp.schedule.dataflow import Value
from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.timetable import Timetable

Floats = npt.NDArray[np.float64]


class Transfer(NamedTuple):
    """A message between two ranks.

    sent: when the sender had made the value; arrived: when the receiver could use it; in ms.
    """

    value: Value
    sender: int
    receiver: int
    sent: float
    arrived: float


class Reduction(NamedTuple):
    """The sum of a stage's gradients over its replicas, on the rank that owns the stage. Times in ms.

    start: when the gradients are complete and the rank's earlier reductions have ended.
    """

    stage: int
    rank: int
    start: float
    end: float


class CopySpan(NamedTuple):
    """When one copy, out of the device or back, started and ended, in ms."""

    value: Value
    rank: int
    is_out: bool
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each action ran, predicted or measured: for each rank the times in ms, in the row's order.

    peak_memory: for each rank. Predicted: the most that the rank holds after an action, in memory_unit, the
    unit of the costs. Measured: the most bytes that its process has held since it started, in earlier steps
    too.
    delays: for each rank, how long after the end of each action its message arrives; empty in a measured
        timeline. lengths: of each unit; empty where all are 1.
    transfers: the messages of a measured timeline; `transfers_of` also makes those of a predicted one.
    reductions: of each stage's gradients over its replicas, rank by rank, in order; empty where none takes
    time.
    copies: of what leaves the device and comes back, rank by rank, in order.
    exposed: for each rank, how much of each action is exposed exchange: tokens are exchanged among experts,
        and no W runs meanwhile. Empty without exchanges.
    """

    timetable: Timetable
    starts: tuple[Floats, ...]
    ends: tuple[Floats, ...]
    peak_memory: tuple[float, ...]
    delays: tuple[Floats, ...] = ()
    lengths: tuple[float, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    copies: tuple[CopySpan, ...] = ()
    exposed: tuple[Floats, ...] = ()
    memory_unit: str = ACTIVATIONS
    measured: bool = False

    @property
    def makespan(self) -> float:
        """Last end minus first start over all ranks. A step ends when its reductions have ended, too."""
        first = float(min(start[0] for start in self.starts))
        return max([self._last_end, *(each.end for each in self.reductions)]) - first

    @property
    def tail(self) -> float:
        """How long (ms) the last reduction still runs when the last action has ended."""
        return max([0.0, *(each.end - self._last_end for each in self.reductions)])

    @property
    def _last_end(self) -> float:
        return float(max(end[-1] for end in self.ends))

    def span(self, rank: int) -> float:
        """Last end minus first start of one rank's actions."""
        return float(self.ends[rank][-1] - self.starts[rank][0])

    def idle(self, rank: int) -> float:
        """The time within its span in which a rank runs nothing."""
        return self.span(rank) - float((self.ends[rank] - self.starts[rank]).sum())

    @property
    def exposed_exchange(self) -> tuple[float, ...]:
        """For each rank, the time of exchanges in which it computes nothing; () without exchanges.

        It is part of F and B, so it is no bubble.
        """
        return tuple(float(each.sum()) for each in self.exposed)

    @property
    def max_span(self) -> float:
        """The largest span of a rank: what the Zero Bubble paper (arXiv:2401.10241) calls cost."""
        return max(map(self.span, self._ranks))

    @property
    def bubble(self) -> float:
        """The largest idle time (ms) of a rank within its own span."""
        return max(map(self.idle, self._ranks))

    @property
    def bubble_rate(self) -> float:
        """The largest share of its span in which a rank is idle."""
        return max(self.idle(rank) / (self.span(rank) or 1.0) for rank in self._ranks)

    @property
    def _ranks(self) -> range:
        return range(self.timetable.num_ranks)


def transfers_of(timeline: Timeline) -> list[Transfer]:
    """A timeline's messages: for each sending rank in turn, in the order of its sends."""
    if timeline.transfers or not timeline.delays:  # measured, with messages or without
        return list(timeline.transfers)
    ranks = range(timeline.timetable.num_ranks)
    return [transfer for rank in ranks for transfer in _predicted(timeline, rank)]


def _predicted(timeline: Timeline, rank: int) -> Iterator[Transfer]:
    """The predicted messages of a rank: sent when the value is made, received after their delay."""
    timetable = timeline.timetable
    row, values = timetable.rows[rank], Values.of(timetable)
    positions, numbers = values.produced_in(row)
    receivers = np.array(timetable.rank_of)[values.stages(numbers)]
    leaves = receivers != rank
    sent = timeline.ends[rank][positions[leaves]]
    arrived = sent + timeline.delays[rank][positions[leaves]]
    for columns in zip(
        values.named(numbers[leaves]),
        receivers[leaves].tolist(),
        sent.tolist(),
        arrived.tolist(),
        strict=True,
    ):
        value, receiver, *times = columns
        yield Transfer(value, rank, receiver, *times)

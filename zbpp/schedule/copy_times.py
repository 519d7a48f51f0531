"""How long the copies of offload.py take, when each one runs, and how they change the device memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from zbpp.schedule.costs import StageCosts
from zbpp.schedule.dataflow import Value
from zbpp.schedule.offload import Await, Drop, Fetch, Offload, RankOffload, Transport


class CopySpan(NamedTuple):
    """When one copy, out of the device or back, started and ended, in ms."""

    value: Value
    rank: int
    is_out: bool
    start: float
    end: float


class RankCopies:
    """One rank's copies while its row is simulated."""

    def __init__(self, rank: int, placed: RankOffload, costs: StageCosts) -> None:
        self.rank, self._costs = rank, costs
        self._placed: dict[tuple[int, bool], list[Transport]] = defaultdict(list)
        self._ends: dict[tuple[Value, bool], float] = {}
        self._free = 0.0
        self.spans: list[CopySpan] = []
        for before, at_once, instruction in placed:
            self._placed[before, at_once].append(instruction)

    def run(self, position: int, at_once: bool, clock: float) -> float:
        """Run the instructions at one place (see Placed) from time `clock` on; returns when they end."""
        for instruction in self._placed.get((position, at_once), ()):
            value = instruction.value
            match instruction:
                case Offload() | Fetch():
                    self._start(value, isinstance(instruction, Offload), clock)
                case Drop() | Await():
                    clock = max(clock, self._ends[value, isinstance(instruction, Drop)])
        return clock

    def _start(self, value: Value, is_out: bool, clock: float) -> None:
        start = max(self._free, clock)
        self._free = self._ends[value, is_out] = start + self._costs.host[value.stage]
        self.spans.append(CopySpan(value, self.rank, is_out, start, self._free))


def changes_of(placed: RankOffload, costs: StageCosts) -> Iterator[tuple[int, float]]:
    """For each Drop and Fetch: (position of the action after it, change of the device memory)."""
    for before, _, instruction in placed:
        if isinstance(instruction, Drop):
            yield before, -costs.held["saved"][instruction.value.stage]
        elif isinstance(instruction, Fetch):
            yield before, costs.held["saved"][instruction.value.stage]

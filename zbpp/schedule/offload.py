"""Offload of activations, as instructions of a program: which values leave the device, and when.

A ROUND TRIP copies saved(s,m), what F keeps for B, to host memory after F, and back before B. A round trip is
four instructions. A rank has one copy stream; c is the time of one copy on it:

    F ... Offload ... Drop .................... Fetch ... Await B
          [---- c ----]                         [- c -]
          on the device       away              on the device again

Offload and Fetch start a copy. Drop and Await wait for the end of a copy; Drop then frees the device memory.

offload_choice.py chooses by costs which values leave, and places the instructions; RankCopies says how
long the copies take.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from zbpp.schedule.costs import StageCosts
from zbpp.schedule.dataflow import Value
from zbpp.schedule.program import Await, Drop, Fetch, Offload, Transport


class Placed(NamedTuple):
    """An instruction and its place between two actions of its rank's row.

    before: the position of the action after the instruction. at_once: whether the rank executes the
    instruction directly after the previous action, or directly before the action at `before`. Between these
    two places the rank may wait for a message.
    """

    before: int
    at_once: bool
    instruction: Transport


RankOffload = tuple[Placed, ...]
"""The instructions of one rank's round trips, in the order in which the rank executes them."""


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
        taken = self._costs.host[value.stage] * self._costs.length(value.microbatch)
        self._free = self._ends[value, is_out] = start + taken
        self.spans.append(CopySpan(value, self.rank, is_out, start, self._free))


def changes_of(placed: RankOffload, costs: StageCosts) -> Iterator[tuple[int, float]]:
    """For each Drop and Fetch: (position of the action after it, change of the device memory)."""
    for before, _, instruction in placed:
        if isinstance(instruction, Drop | Fetch):
            stage, microbatch = instruction.value.stage, instruction.value.microbatch
            size = costs.held["saved"][stage] * costs.length(microbatch)
            yield before, -size if isinstance(instruction, Drop) else size

"""Inserts the copies of an activation offload: which values leave the device, and when.

A ROUND TRIP copies saved(s,m), what F keeps for B, to host memory after F, and back before B. A round trip is
four instructions. A rank has one copy stream; c is the time of one copy on it:

    F ... Offload ... Drop .................... Fetch ... Await B
          [---- c ----]                         [- c -]
          on the device       away              on the device again

Offload and Fetch start a copy. Drop and Await wait for the end of a copy; Drop then frees the device memory.

    ... 0F3  Drop saved(0,1)  Offload saved(0,3)  Recv g(0,0) from 1  Await saved(0,0)  0B0 ...

choice.py chooses by costs which values leave, and places the instructions.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from zbpp.schedule.costs import StageCosts
from zbpp.schedule.dataflow import Value
from zbpp.schedule.interpret.memory import RankBytes
from zbpp.schedule.interpret.timing import RankClock
from zbpp.schedule.program import Instruction, Program, Recv
from zbpp.schedule.timeline import CopySpan
from zbpp.schedule.timetable import Action


class Offload(NamedTuple):
    """Start to copy a value out of device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Offload {self.value}"

    @property
    def is_out(self) -> bool:
        """Whether the copy leaves the device: observers measure it."""
        return True

    def pass_time(self, clock: RankClock) -> None:
        """Start the copy."""
        _start(clock, self.value, is_out=True)

    def change_bytes(self, memory: RankBytes) -> None:
        """Host memory holds the copy."""
        memory.on_host(memory.stages[self.value.stage].leaves)


class Drop(NamedTuple):
    """Wait until a value has been copied out, then free its device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Drop {self.value}"

    def pass_time(self, clock: RankClock) -> None:
        """Wait for the copy."""
        clock.wait(clock.ended[self.value, True])

    def memory_change(self, costs: StageCosts) -> float:
        """What the value has held is free."""
        return -_held(costs, self.value)

    def change_bytes(self, memory: RankBytes) -> None:
        """The device no longer holds the value."""
        memory.saved(-memory.stages[self.value.stage].leaves)


class Fetch(NamedTuple):
    """Start to copy a value back into device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Fetch {self.value}"

    @property
    def is_out(self) -> bool:
        """Whether the copy leaves the device: observers measure it."""
        return False

    def pass_time(self, clock: RankClock) -> None:
        """Start the copy back."""
        _start(clock, self.value, is_out=False)

    def memory_change(self, costs: StageCosts) -> float:
        """The value is held again."""
        return _held(costs, self.value)

    def change_bytes(self, memory: RankBytes) -> None:
        """The device holds the value again, and host memory no longer holds its copy."""
        size = memory.stages[self.value.stage].leaves
        memory.saved(size)
        memory.on_host(-size)


class Await(NamedTuple):
    """Wait until a value is back in device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Await {self.value}"

    def pass_time(self, clock: RankClock) -> None:
        """Wait for the copy back."""
        clock.wait(clock.ended[self.value, False])


Transport = Offload | Drop | Fetch | Await


def _start(clock: RankClock, value: Value, *, is_out: bool) -> None:
    """Start a copy; a rank copies one thing at a time."""
    taken = clock.costs.host[value.stage] * clock.costs.length(value.microbatch)
    start, clock.ended[value, is_out] = clock.stream("copies").run(clock.now, taken)
    clock.copies.append(CopySpan(value, clock.rank, is_out, start, clock.ended[value, is_out]))


def _held(costs: StageCosts, value: Value) -> float:
    """What F of a microbatch keeps for its B, in the unit of the costs."""
    return costs.held["saved"][value.stage] * costs.length(value.microbatch)


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


def with_copies(program: Program, placed: RankOffload) -> Program:
    """A program with the copies of its rank."""
    copies: dict[tuple[int, bool], list[Instruction]] = defaultdict(list)
    positions = program.positions()
    for copy in placed:
        copies[positions[copy.before], copy.at_once].append(copy.instruction)
    found, receives, position = list[Instruction](), list[Instruction](), 0
    for each in (*program.instructions, None):
        if isinstance(each, Action) or each is None:
            found += [*copies[position, True], *receives, *copies[position, False]]
            found += [] if each is None else [each]
            receives, position = [], position + 1
        elif receives or isinstance(each, Recv):  # what follows a Recv may need it
            receives.append(each)
        else:
            found.append(each)
    return program._replace(instructions=tuple(found))

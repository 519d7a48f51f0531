"""What one rank executes: actions, and every other instruction that there is, as a value with a text.

    instruction            by the pass       runs
    2F5, 2B5, 2W5, 2BW5    lower             the core: a stage's work on a microbatch
    Post, Recv             posts, lower      the core: a receive starts; its value is taken
    Send, Release          lower             the core: a send starts; it has ended, and its memory is free
    Reduce, Reduced        lower, a feature  a feature: a stage's reduction starts; it has ended
    PartOfW                a feature         a feature: a part of a W runs ahead of it
    OnMessage              a feature         a feature: a message becomes another one

A feature's other instructions are in its folder (zbpp/features). An instruction is a hashable value with a
text. It may say more about itself, by methods that the interpreters of whole programs ask for:

    pass_time(clock)        what a rank that comes to it waits for, or starts (interpret/timing.py)
    memory_change(costs)    by how much it changes what the device holds, in the unit of the costs
    change_bytes(memory)    the same in bytes of a rank's components (interpret/memory.py)
    fence                   until here the program may be run again from its beginning (passes/posts.py)

A program has no decisions in it: str(program) is the whole truth of a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from zbpp.schedule.dataflow import Value
from zbpp.schedule.timetable import Action

Instruction = Hashable
"""An Action, one of the instructions below, or one of a user's feature: a value with a text."""


class Program(NamedTuple):
    """What one rank executes, in order.

    row: the rank's row of the timetable. posts.py reads `in_flight` and `sent`. Both are facts of the
    timeline in which F, B and W take one unit of time, BW takes two, and messages take none. in_flight[peer]:
    the most values that the link from `peer` holds at a time. sent: for each value from another rank, in the
    order of the sends: (how many actions of this rank begin before the value is sent, the rank that sends
    it).
    """

    rank: int
    instructions: tuple[Instruction, ...]
    in_flight: dict[int, int]
    sent: tuple[tuple[int, int], ...] = ()
    row: Sequence[Action] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self.instructions))

    def positions(self) -> Sequence[int]:
        """For each position in the row, and its end: how many actions of the program stand before it.

        That is the position itself, unless a pass has dropped actions.
        """
        kept = {each for each in self.instructions if isinstance(each, Action)}
        if len(kept) == len(self.row):
            return range(len(self.row) + 1)
        return [0, *accumulate(action in kept for action in self.row)]


class Send(NamedTuple):
    """Start to send a value to another rank."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"Send {self.value} to {self.peer}"


class Post(NamedTuple):
    """Start to receive the next value of the link from `peer`; see posts.py."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"Post {self.value} from {self.peer}"


class Recv(NamedTuple):
    """Take the next value of the link from `peer`: wait for the oldest receive that has started."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"Recv {self.value} from {self.peer}"


class Release(NamedTuple):
    """Wait until a value sent to `peer` has been received, then free its memory; oldest value first."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"Release {self.value} to {self.peer}"


class Reduce(NamedTuple):
    """Start to reduce a stage's gradients over its replicas or shards: its last W or BW has run."""

    stage: int

    def __str__(self) -> str:
        return f"Reduce {self.stage}"


class Reduced(NamedTuple):
    """Wait until a stage's gradients have been reduced; a program has it where somebody reduces them."""

    stage: int

    def __str__(self) -> str:
        return f"Reduced {self.stage}"


@dataclass(frozen=True)
class PartOfW:
    """Base of a feature's instructions that run a part of a W ahead of it, at the end of its B."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.stage}W{self.microbatch}"


@dataclass(frozen=True)
class OnMessage:
    """Base of a feature's instructions that take the message of a value, and put another one in its place."""

    value: Value

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.value}"

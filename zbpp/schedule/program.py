"""What one rank executes: actions, and every other instruction that there is, as a value with a text.

    instruction            by the pass       runs
    2F5, 2B5, 2W5, 2BW5    lower             the core: a stage's work on a microbatch
    Post, Recv             posts, lower      the core: a receive starts; its value is taken
    Send, Release          lower             the core: a send starts; it has ended, and its memory is free
    Reduce, Reduced        lower, reduce     replicas, shards: a stage's reduction starts; it has ended
    Zero copies, Reduce shared parameters    reduce: tied parameters
    Offload, Drop, Fetch, Await              copies: activations leave the device and come back
    HeadW, Accumulate, Update, Gate          head_w, update, update, gate
    OnMessage                                a feature's: a message becomes another one

A program has no decisions in it: str(program) is the whole truth of a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from zbpp.schedule.dataflow import Value
from zbpp.schedule.gate import Gate
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


class Offload(NamedTuple):
    """Start to copy a value out of device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Offload {self.value}"


class Drop(NamedTuple):
    """Wait until a value has been copied out, then free its device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Drop {self.value}"


class Fetch(NamedTuple):
    """Start to copy a value back into device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Fetch {self.value}"


class Await(NamedTuple):
    """Wait until a value is back in device memory."""

    value: Value

    def __str__(self) -> str:
        return f"Await {self.value}"


Transport = Offload | Drop | Fetch | Await


class ZeroCopies(NamedTuple):
    """Set the gradients of tied copies to zero: their owner's holds the sum of earlier steps."""

    def __str__(self) -> str:
        return "Zero copies"


class ReduceShared(NamedTuple):
    """Reduce the gradients of parameters that several stages or ranks share, and of the loss."""

    def __str__(self) -> str:
        return "Reduce shared parameters"


class HeadW(NamedTuple):
    """The part of a W that holds large gradients: the W of a language model's head."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"HeadW {self.stage}W{self.microbatch}"


class Accumulate(NamedTuple):
    """Give a microbatch's gradients to the states of the optimizer, and drop them."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"Accumulate {self.stage}W{self.microbatch}"


class Update(NamedTuple):
    """Update a stage's weights: their gradients are final."""

    stage: int

    def __str__(self) -> str:
        return f"Update {self.stage}"


@dataclass(frozen=True)
class OnMessage:
    """Base of a feature's instructions that take the message of a value, and put another one in its place."""

    value: Value

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.value}"


class PassGate(NamedTuple):
    """Wait until the last update of the weights is known to be right: an instruction at the rank's gate."""

    gate: Gate

    def __str__(self) -> str:
        return "Gate"

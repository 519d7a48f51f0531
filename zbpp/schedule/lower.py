"""From a timetable to one program per rank: the same actions, with messages.

A link (the directed path between two ranks) is a FIFO in the order of its sends. So a rank
that needs a value first receives what the same link carries before it, whether or not
it is needed yet; pairing each receive with its consumer alone would silently deliver x
where g was due.

    rank 0   0F0  Send x(1,0)  0F1  Send x(1,1)  0F2  Send x(1,2)  Release x(1,0)  Recv g(0,0)  0B0 ...
    rank 1   Recv x(1,0)  1F0  1B0  Send g(0,0)  1W0  Recv x(1,1)  1F1 ...

A sent tensor must live until it has been received, and a sender may not run ahead of its
receiver without end. If, with every action taking one unit of time, a link never holds more
than d values, sent but not consumed, then by the time value k + d + 1 is sent, value k was
consumed earlier: there the program says Release, which waits for value k and lets its memory go.
That can't close a circle of waiting, since in that timeline every wait looks back in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np

from zbpp.schedule.dataflow import Value, produces
from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.simulate import Floats, Timeline, simulate
from zbpp.schedule.timetable import Action, Op, Timetable


class Send(NamedTuple):
    """Start to send a value to another rank."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"Send {self.value} to {self.peer}"


class Recv(NamedTuple):
    """Take the next value that the link from `peer` delivers."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"Recv {self.value} from {self.peer}"


class Release(NamedTuple):
    """Wait until the oldest unreleased value sent to `peer` has been received; let its memory go."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"Release {self.value} to {self.peer}"


Instruction = Action | Send | Recv | Release


class Program(NamedTuple):
    """What one rank executes, in order.

    in_flight[peer]: how many values the link from `peer` holds at most in the timeline of unit
    times: as many receives are worth posting ahead.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    in_flight: dict[int, int]

    def __str__(self) -> str:
        return "\n".join(map(str, self.instructions))


class Programs(Sequence[Program]):
    """One program per rank, each lowered when it is asked for: a rank needs only its own."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._links = _connected(timeline.timetable)
        self._values = Values(timeline.timetable.num_stages, timeline.timetable.num_microbatches)

    @property
    def links(self) -> list[tuple[int, int]]:
        """(sender, receiver) of every link, in an order that all ranks share."""
        return sorted(self._links)

    def __len__(self) -> int:
        return self._timeline.timetable.num_ranks

    @overload
    def __getitem__(self, rank: int) -> Program: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Program]: ...
    def __getitem__(self, rank: int | slice) -> Program | list[Program]:
        chosen = range(len(self))[rank]
        return self._lower(chosen) if isinstance(chosen, int) else [self._lower(each) for each in chosen]

    def _lower(self, rank: int) -> Program:
        touching = sorted(pair for pair in self._links if rank in pair)
        links = {pair: _Link(self._timeline, self._values, *pair) for pair in touching}
        inbound = {sender: link for (sender, receiver), link in links.items() if receiver == rank}
        outbound = {receiver: link for (sender, receiver), link in links.items() if sender == rank}
        # Action i has place 3i + 1: room for what it receives before it, and for what it sends after it.
        instructions: list[Instruction] = [*self._timeline.timetable.rows[rank]]
        places = [3 * np.arange(len(instructions)) + 1]
        for peer, link in inbound.items():
            instructions += [Recv(value, peer) for value in link.values]
            places += [3 * link.received_at]
        for peer, link in outbound.items():
            behind = link.in_flight + 1
            instructions += [Send(value, peer) for value in link.values]
            instructions += [Release(value, peer) for value in link.values[:-behind]]
            places += [3 * link.sent_at + 2, 3 * link.sent_at[behind:] + 2]
        order = np.argsort(np.concatenate(places), kind="stable").tolist()
        in_flight = {peer: link.in_flight for peer, link in inbound.items()}
        return Program(rank, tuple([instructions[i] for i in order]), in_flight)


class _Link:
    """The messages from one rank to another, in the order of their sends."""

    def __init__(self, timeline: Timeline, values: Values, sender: int, receiver: int) -> None:
        timetable = timeline.timetable
        made_at, made = values.produced_in(timetable.rows[sender])
        used_at, used = values.consumed_in(timetable.rows[receiver])
        leaves = np.array(timetable.rank_of)[values.stages(made)] == receiver
        numbers = made[leaves]
        self.values = values.named(numbers)
        self.sent_at = made_at[leaves]  # the action of the sender's row after which each value leaves
        _, here, there = np.intersect1d(numbers, used, assume_unique=True, return_indices=True)
        consumed_at = np.empty_like(self.sent_at)
        consumed_at[here] = used_at[there]
        # FIFO: a value is received before the first action that needs it or anything behind it.
        self.received_at = np.minimum.accumulate(consumed_at[::-1])[::-1]
        self.in_flight = _most_in_flight(
            timeline.ends[sender][self.sent_at], timeline.starts[receiver][consumed_at]
        )


def _connected(timetable: Timetable) -> set[tuple[int, int]]:
    """(sender, receiver) of every pair of ranks between which values may travel."""
    pairs = (
        (owner, timetable.rank_of[value.stage])
        for stage, owner in enumerate(timetable.rank_of)
        for op in Op
        for value in produces(Action(stage, op, 0), timetable.num_stages)
    )
    return {(sender, receiver) for sender, receiver in pairs if sender != receiver}


def _most_in_flight(sent: Floats, consumed: Floats) -> int:
    sent, consumed = np.sort(sent), np.sort(consumed)
    waiting = np.searchsorted(sent, consumed, "right") - np.searchsorted(consumed, consumed, "left")
    return int(waiting.max(initial=0))


def lower(timetable: Timetable) -> Programs:
    """One program per rank: the timetable's actions with the messages between them.

    Never deadlocks, pairs every message, leaves nothing over: held by a property test over
    random timetables and placements. Raises PlanError as `simulate` does.
    """
    return Programs(simulate(timetable))

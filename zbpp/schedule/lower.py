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

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np

from zbpp.schedule.dataflow import Value, consumes, produces
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
        links = {pair: _Link(self._timeline, *pair) for pair in sorted(self._links) if rank in pair}
        inbound = {sender: link for (sender, receiver), link in links.items() if receiver == rank}
        outbound = {receiver: link for (sender, receiver), link in links.items() if sender == rank}
        before: dict[int, list[Instruction]] = defaultdict(list)
        after: dict[int, list[Instruction]] = defaultdict(list)
        for peer, link in inbound.items():
            for value, action in zip(link.values, link.received_at, strict=True):
                before[action].append(Recv(value, peer))
        for peer, link in outbound.items():
            behind = link.in_flight + 1
            for k, (value, action) in enumerate(zip(link.values, link.sent_at, strict=True)):
                after[action].append(Send(value, peer))
                if k >= behind:
                    after[action].append(Release(link.values[k - behind], peer))
        row = self._timeline.timetable.rows[rank]
        instructions = [step for i, action in enumerate(row) for step in (*before[i], action, *after[i])]
        return Program(rank, tuple(instructions), {peer: link.in_flight for peer, link in inbound.items()})


class _Link:
    """The messages from one rank to another, in the order of their sends."""

    def __init__(self, timeline: Timeline, sender: int, receiver: int) -> None:
        timetable = timeline.timetable
        self.values: list[Value] = []
        self.sent_at: list[int] = []  # the action of the sender's row after which each value leaves
        for index, action in enumerate(timetable.rows[sender]):
            for value in produces(action, timetable.num_stages):
                if timetable.rank_of[value.stage] == receiver:
                    self.values.append(value)
                    self.sent_at.append(index)
        consumers = {
            value: index
            for index, action in enumerate(timetable.rows[receiver])
            for value in consumes(action)
        }
        consumed_at = np.array([consumers[value] for value in self.values], dtype=int)
        # FIFO: a value is received before the first action that needs it or anything behind it.
        self.received_at: list[int] = np.minimum.accumulate(consumed_at[::-1])[::-1].tolist()
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

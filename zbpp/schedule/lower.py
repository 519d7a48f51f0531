"""Lower a timetable to one program per rank: the same actions, with messages and reductions between them.

A link, the directed path from one rank to another, is a FIFO: it delivers in the order of its sends. So a
rank that needs a value first receives what the link carries before that value. Stages 0 and 3 on rank 0, 1
and 2 on rank 1 (a V) show why; sends are left out:

    rank 0 runs   0F0 0F1 3F0 3B0 ...        so its link to rank 1 carries  x(1,0)  x(1,1)  g(2,0)
    rank 1 runs   1F0 2F0 2B0 1F1 ...        so it consumes                 x(1,0)  g(2,0)  x(1,1)

    right   Recv x(1,0)  1F0  2F0  Recv x(1,1)  Recv g(2,0)  2B0  1F1
    wrong   Recv x(1,0)  1F0  2F0  Recv g(2,0)  2B0  Recv x(1,1)  1F1      2B0 would be given x(1,1)

A sent tensor must stay in memory until it has been received, and a sender must not run ahead of its
receiver without end. So a program also has Release instructions; each waits until an earlier value has been
received. Where the Releases stand follows from one timeline, in which F, B and W take one unit of time, BW
takes two, and messages take none. 1F1B on two ranks, with the x's that its link carries:

    time        0    1    2    3    4    5    6    7
    rank 0      0F0  0F1            0BW0      0F2
    the link         x0   x1--------|              x2     at most one value is sent and not yet consumed
    rank 1           1F0  1BW0      1F1  1BW1      1F2

    rank 0 runs   0F0  Send x0  0F1  Send x1  0BW0  0F2  Send x2  Release x0

Let d be the most values that a link holds at a time in that timeline, sent and not yet consumed; here d = 1.
When value k + d + 1 is sent, at most d of the values from k on are not consumed yet. So k or a later one has
begun to be consumed, and k has been received, since the link is a FIFO: value k is released right after that
send. The last d + 1 values of a link have no Release: the executor waits for them at the end of the step.
Whatever an instruction waits for lies earlier in that timeline, so the waits cannot form a circle.

A Reduce stands where its stage's gradients are complete: behind the stage's last W or BW, and behind the Send
that follows this action. A Reduce starts the reduction and does not wait for it. A Release behind the same
action comes after the Reduce, since a Release may have to wait.

Passes (passes/) put into a program what features need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from zbpp.schedule.costs import Costs
from zbpp.schedule.dataflow import produces
from zbpp.schedule.dataflow_arrays import Numbers, Values, complete_stages
from zbpp.schedule.program import Instruction, Program, Recv, Reduce, Release, Send
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timeline import Floats, Timeline
from zbpp.schedule.timetable import Action, Op, Timetable

# The kinds of instruction around each action of a row, in the order in which they run:
_NUM_KINDS = 5
_RECV, _ACTION, _SEND, _REDUCE, _RELEASE = range(_NUM_KINDS)


class Programs(Sequence[Program]):
    """A sequence of one program per rank. A program is made when it is indexed: a rank needs only its own.

    timeline: the unit timeline that messages follow. links: (sender, receiver) of every link.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self._whole = timeline, timeline.timetable
        self._links = _connected(timeline.timetable)
        self._values = Values.of(timeline.timetable)

    def reducing_as(self, whole: Timetable) -> Programs:
        """These programs, with the stages of each rank reduced in the order of another timetable.

        whole: the timetable that this one lacks some microbatches of. Replicas may lack different ones, and a
        reduction is collective over replicas.
        """
        found = Programs(self.timeline)
        found._whole = whole
        return found

    @property
    def links(self) -> list[tuple[int, int]]:
        """(sender, receiver) of every link, in the same order on all ranks."""
        return sorted(self._links)

    def __len__(self) -> int:
        return self.timeline.timetable.num_ranks

    @overload
    def __getitem__(self, rank: int) -> Program: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Program]: ...
    def __getitem__(self, rank: int | slice) -> Program | list[Program]:
        chosen = range(len(self))[rank]
        return self._lower(chosen) if isinstance(chosen, int) else [self._lower(rank) for rank in chosen]

    def _lower(self, rank: int) -> Program:
        touching = sorted(pair for pair in self._links if rank in pair)
        links = {pair: Link(self.timeline, self._values, *pair) for pair in touching}
        inbound = {sender: link for (sender, receiver), link in links.items() if receiver == rank}
        outbound = {receiver: link for (sender, receiver), link in links.items() if sender == rank}
        row = self.timeline.timetable.rows[rank]
        instructions: list[Instruction] = [*row]
        keys = [_sort_keys(np.arange(len(row)), _ACTION)]
        for peer, link in inbound.items():
            instructions += [Recv(value, peer) for value in link.values]
            keys += [_sort_keys(link.received_at, _RECV)]
        for peer, link in outbound.items():
            behind = link.in_flight + 1  # value k is released where value k + behind is sent
            instructions += [Send(value, peer) for value in link.values]
            instructions += [Release(value, peer) for value in link.values[:-behind]]
            keys += [_sort_keys(link.sent_at, _SEND), _sort_keys(link.sent_at[behind:], _RELEASE)]
        complete_at, reduced = complete_stages(row), [*complete_stages(self._whole.rows[rank])]
        instructions += map(Reduce, reduced)
        places = np.array([complete_at[stage] for stage in reduced], dtype=np.int64)
        keys += [_sort_keys(np.maximum.accumulate(places), _REDUCE)]
        order = np.argsort(np.concatenate(keys), kind="stable").tolist()
        in_flight = {peer: link.in_flight for peer, link in inbound.items()}
        sends = sorted((time, peer) for peer, link in inbound.items() for time in link.sent.tolist())
        begun = np.searchsorted(self.timeline.starts[rank], [time for time, _ in sends]).tolist()
        sent = tuple(zip(begun, [peer for _, peer in sends], strict=True))
        return Program(rank, tuple([instructions[i] for i in order]), in_flight, sent, row)


def _sort_keys(positions: Numbers, kind: int) -> Numbers:
    """Sort keys of instructions of one kind around the actions at `positions` of a row."""
    return _NUM_KINDS * positions + kind


class Link:
    """The messages from one rank to another, in the order of their sends.

    sent: for each message the time at which it is sent in the timeline.
    sent_at: for each message the position, in the sender's row, of the action after which it is sent.
    received_at: the position, in the receiver's row, of the action before which it is received: the consumer
        of the message, or the consumer of a later message of the link, if that one runs first.
    """

    def __init__(self, timeline: Timeline, values: Values, sender: int, receiver: int) -> None:
        timetable = timeline.timetable
        made_at, made = values.produced_in(timetable.rows[sender])
        used_at, used = values.consumed_in(timetable.rows[receiver])
        leaves = np.array(timetable.rank_of)[values.stages(made)] == receiver
        numbers = made[leaves]
        self.values = values.named(numbers)
        self.sent_at = made_at[leaves]
        _, in_sent, in_used = np.intersect1d(numbers, used, assume_unique=True, return_indices=True)
        consumed_at = np.empty_like(self.sent_at)
        consumed_at[in_sent] = used_at[in_used]
        # FIFO: a value is received before the first action that needs it or any value sent after it.
        self.received_at = np.minimum.accumulate(consumed_at[::-1])[::-1]
        self.sent = timeline.ends[sender][self.sent_at]
        self.in_flight = _most_in_flight(self.sent, timeline.starts[receiver][consumed_at])


def _connected(timetable: Timetable) -> set[tuple[int, int]]:
    """(sender, receiver) wherever the first rank makes a value that the second one consumes."""
    pairs = (
        (owner, timetable.rank_of[value.stage])
        for stage, owner in enumerate(timetable.rank_of)
        for op in Op
        for value in produces(Action(stage, op, 0), timetable.num_stages)
    )
    return {(sender, receiver) for sender, receiver in pairs if sender != receiver}


def _most_in_flight(sent: Floats, consumed: Floats) -> int:
    """The most values that are sent and not consumed at a time, given both times of each value."""
    sent, consumed = np.sort(sent), np.sort(consumed)
    waiting = np.searchsorted(sent, consumed, "right") - np.searchsorted(consumed, consumed, "left")
    return int(waiting.max(initial=0))


def lower(timetable: Timetable) -> Programs:
    """Make one program per rank: the timetable's actions with the messages between them, and with Reduces.

    Each stage has one Reduce; in a timetable of F's alone, as an evaluation has, none.
    The programs never deadlock, and every message that is sent is received; a property test holds this over
    random timetables and placements. Raises PlanError as `simulate` does.
    """
    # Whole numbers: values in flight are counted alike on every rank.
    return Programs(simulate(timetable, Costs().unit_slices(timetable.num_slices)))

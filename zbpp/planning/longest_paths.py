"""A timetable's actions by level, so that many sets of durations are timed at once.

Durations change no dependency: each action waits for the action before it on its rank and for its message. So
the actions are sorted once by level, the number of actions on the longest path to them, and the actions of a
level are timed together, for all sets of durations together. The order of the messages on a link is fixed,
too: that of the sender's row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.schedule.costs import Costs
from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Timetable

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Sending(NamedTuple):
    """Arrays by action and set of durations.

    busy: how long (ms) the action's message occupies its link. is_sent: whether it has one; of an empty
    microbatch nothing is sent. before: by action, the one whose message goes out just before its own.
    """

    busy: Floats
    is_sent: npt.NDArray[np.bool_]
    before: Numbers


class LongestPaths:
    """A timetable's actions in an order in which they can run.

    order: the actions in this order, by their numbers; all rows' actions are numbered row by row.
    previous, sender: by action, the action before it on its rank, and the one whose message it waits for;
    `none`, which ends at 0 ms, stands for "no such action".
    """

    def __init__(self, timetable: Timetable) -> None:
        """Raises PlanError for a timetable that can't run."""
        # An action's level is its start if every action takes 1. Simulating also checks the timetable.
        levels = np.concatenate(simulate(timetable, Costs(bw=1.0).unit_slices(timetable.num_slices)).starts)
        self.order: Numbers = np.argsort(levels, kind="stable")
        self.previous, self.sender = _links(timetable, self.order)
        self.none = len(self.order)
        self._levels = _slices(levels[self.order])
        self._rank = np.repeat(np.arange(timetable.num_ranks), [*map(len, timetable.rows)])[self.order]

    def sent_before(self, queues: Numbers) -> Numbers:
        """By action, the one whose message goes out just before its own, in the same queue; or `none`.

        queues: by action, that of its message's route; negative: it sends none.
        """
        senders = np.flatnonzero(queues >= 0)
        own = self._rank[senders] * (self._rank.max() + 1) + queues[senders]
        by_queue = np.lexsort((senders, own))
        before = np.where(np.diff(own[by_queue], prepend=-1) == 0, np.roll(senders[by_queue], 1), self.none)
        found = np.full(self.none, self.none)
        found[senders[by_queue]] = before
        return found

    def ends(self, durations: Floats, delays: Floats, sending: Sending | None = None) -> Floats:
        """When each action ends (ms), and 0 for `none`: an array by action and set of durations.

        durations: ms, by action and set. delays: how long after it has gone out the message that an action
        waits for is there (ms), by action and set. sending: how messages occupy links; None: not at all.
        """
        return self.ends_and_sent(durations, delays, sending)[0]

    def ends_and_sent(
        self, durations: Floats, delays: Floats, sending: Sending | None = None
    ) -> tuple[Floats, Floats]:
        """`ends`, and when each action's message has gone out, at the action's end where nothing is sent."""
        ends = np.zeros((self.none + 1, durations.shape[1]))
        ends[:-1] = durations
        sent = free = ends
        if sending is not None:
            sent, free = (
                np.zeros_like(ends),
                np.zeros_like(ends),
            )  # free: when the action's link is free again
        for level in self._levels:
            arrived = sent[self.sender[level]]
            arrived += delays[level]
            ends[level] += np.maximum(ends[self.previous[level]], arrived, out=arrived)
            if sending is not None:
                before = free[sending.before[level]]
                gone = np.maximum(ends[level], before) + sending.busy[level]
                sent[level] = np.where(sending.is_sent[level], gone, ends[level])
                free[level] = np.where(sending.is_sent[level], gone, before)
        return ends, sent


def _links(timetable: Timetable, order: Numbers) -> tuple[Numbers, Numbers]:
    """(previous, sender) in this order of all rows' actions, which are numbered row by row."""
    sizes = [len(row) for row in timetable.rows]
    firsts, none = np.cumsum([0, *sizes[:-1]]), sum(sizes)
    values = Values.of(timetable)
    maker = np.full(len(values), none)
    for first, row in zip(firsts, timetable.rows, strict=True):
        positions, made = values.produced_in(row)
        maker[made] = first + positions
    previous, sender = np.arange(-1, none - 1), np.full(none, none)
    previous[firsts] = none
    for first, row in zip(firsts, timetable.rows, strict=True):
        positions, used = values.consumed_in(row)
        remote = (maker[used] < first) | (maker[used] >= first + len(row))
        sender[first + positions[remote]] = maker[used[remote]]
    renumbered = np.empty(none + 1, dtype=np.int64)
    renumbered[order], renumbered[none] = np.arange(none), none
    return renumbered[previous[order]], renumbered[sender[order]]


def _slices(levels: Floats) -> list[slice]:
    """The actions of each level, where they are sorted by level."""
    begins = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), len(levels)]
    return [slice(begin, end) for begin, end in pairwise(begins)]

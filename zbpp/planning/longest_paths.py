"""A timetable's actions by level, so that many sets of durations are timed at once.

Durations change no dependency: each action waits for the action before it on its rank and for its message. So
the actions are sorted once by level, the number of actions on the longest path to them, and the actions of a
level are timed together, for all sets of durations together.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from zbpp.schedule.costs import Costs
from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Timetable

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


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

    def ends(self, durations: Floats, arrivals: Floats) -> Floats:
        """When each action ends (ms), and 0 for `none`: an array by action and set of durations.

        durations: ms, by action and set. arrivals: how long after its sender's end an action's message is
        there (ms), by action and set.
        """
        ends = np.zeros((self.none + 1, durations.shape[1]))
        ends[:-1] = durations
        for level in self._levels:
            sent = ends[self.sender[level]]
            sent += arrivals[level]
            ends[level] += np.maximum(ends[self.previous[level]], sent, out=sent)
        return ends


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

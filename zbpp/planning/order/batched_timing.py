"""The makespans of many orders of the microbatches in one timetable, at once.

An order changes no dependency, only durations: see zbpp/planning/longest_paths.py.
Reductions don't count, and W's take no time from exchanges (zbpp/schedule/interpret/exchange.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from zbpp.planning.longest_paths import Floats, LongestPaths, Numbers, Sending
from zbpp.planning.options import ROUNDING
from zbpp.schedule.costs import Costs
from zbpp.schedule.dataflow_arrays import kinds_of
from zbpp.schedule.row_costs import RowCosts, by_kind, messages_by_kind
from zbpp.schedule.timetable import Row, Timetable


class PathTerms(NamedTuple):
    """What a path through the timetable takes of the microbatch at each place of the order.

    Place i contributes linear[i] * length + quadratic[i] * length ** 2 (ms). fixed: what the path takes
    whatever the lengths (ms).
    """

    linear: Floats
    quadratic: Floats
    fixed: float


class BatchedTiming:
    """A timetable's actions in an order in which they can run; costs of lengths.

    sizes: of each microbatch, by which its memory grows; the lengths, unless they are given.
    linear, quadratic, delay: by action, what it takes (ms), and how long the message that it waits for is on
    its way, of a microbatch of length 1; with slices, of the action's slice of such a microbatch. latency: of
    that message, whatever the length, unless the microbatch is empty. busy: how long the action's own message
    occupies its link, of length 1. before: whose message goes out just before it.
    paths: which action waits for which.
    """

    def __init__(self, timetable: Timetable, costs: Costs, sizes: Sequence[float] | None = None) -> None:
        """Raises PlanError for a timetable that can't run, and for another number of lengths."""
        costs.of_units(timetable)  # refuses another number of lengths
        self.lengths, num_slices = np.array(costs.lengths), timetable.num_slices
        self.sizes = self.lengths if sizes is None else np.array(sizes)
        self.paths = paths = LongestPaths(timetable)
        order, sender = paths.order, paths.sender
        rows = timetable.rows
        kinds = np.concatenate([kinds_of(row) for row in rows])[order]
        units = np.concatenate([row.microbatches for row in rows])[order]
        own = replace(costs, lengths=(1.0,)).per_stage(timetable.num_stages, 1, num_slices, timetable.rank_of)
        length, square = (np.array(each)[units % num_slices] for each in (own.lengths, own.squares))
        self.place = units // num_slices
        self.linear = by_kind(own.duration)[kinds] * length
        self.quadratic = by_kind(own.quadratic)[kinds] * square if own.quadratic else np.zeros(len(kinds))
        fixed, per_length = messages_by_kind(own)
        routes = own.routes or [None] * len(fixed)
        busy = np.array([each.busy if each else 0.0 for each in routes])
        self.busy = busy[kinds] * length
        self.before = paths.sent_before(np.array([each.queue if each else -1 for each in routes])[kinds])
        delay = np.append((per_length - busy)[kinds] * length, 0.0)
        latency = np.append(fixed[kinds], 0.0)
        self.delay = np.where(sender == paths.none, 0.0, delay[sender])
        self.latency = np.where(sender == paths.none, 0.0, latency[sender])
        of_first = [Row(row.stages, row.ops, row.microbatches % num_slices, num_slices) for row in rows]
        changes = map(RowCosts(own).memory, of_first)
        self._memory = [
            (each, row.microbatches // num_slices) for each, row in zip(changes, rows, strict=True)
        ]
        self._static = [sum(own.static[stage] for stage in timetable.stages_of(r)) for r in range(len(rows))]

    def ends(self, in_order: Floats) -> Floats:
        """When each action ends (ms), and 0 for `none`: an array by action and order.

        in_order[i, j]: the length of the microbatch at place i of order j.
        """
        return self._ends_and_sent(in_order)[0]

    def _ends_and_sent(self, in_order: Floats) -> tuple[Floats, Floats]:
        lengths = in_order[self.place]
        durations = self.linear[:, None] * lengths + self.quadratic[:, None] * lengths**2
        delays = self.delay[:, None] * lengths + self.latency[:, None] * (lengths > 0)
        busy = self.busy[:, None] * lengths
        sending = Sending(busy, lengths > 0, self.before) if self.busy.any() else None
        return self.paths.ends_and_sent(durations, delays, sending)

    def makespans(self, orders: Numbers) -> Floats:
        """The makespan (ms) of each order; orders[i, j]: the microbatch at place i of order j."""
        makespans: Floats = self.ends(self.lengths[orders]).max(axis=0)
        return makespans

    def peaks(self, orders: Numbers) -> Floats:
        """The most that each rank holds in each order: an array by rank and order."""
        sizes = self.sizes[orders]
        held = [
            np.cumsum(change[:, None] * sizes[places], axis=0).max(axis=0) for change, places in self._memory
        ]
        peaks: Floats = np.array(held) + np.array(self._static)[:, None]
        return peaks

    def critical_path(self, in_order: Floats) -> PathTerms:
        """The terms of a longest path in one order; of several, the one that changes rank least."""
        ends, sent = (each[:, 0] for each in self._ends_and_sent(in_order[:, None]))
        linear, quadratic, fixed = np.zeros(len(in_order)), np.zeros(len(in_order)), 0.0
        a = int(ends[:-1].argmax())
        previous, sender = self.paths.previous, self.paths.sender
        while a != self.paths.none:
            place = self.place[a]
            linear[place] += self.linear[a]
            quadratic[place] += self.quadratic[a]
            delay = self.delay[a] * in_order[place] + self.latency[a] * (in_order[place] > 0)
            if sent[sender[a]] + delay <= ends[previous[a]] * (1 + ROUNDING):
                a = int(previous[a])
                continue
            linear[place] += self.delay[a]
            # An empty microbatch takes no latency and waits in no queue, and any place may be that of one.
            fixed += self.latency[a] if self.lengths.all() else 0.0
            a = int(sender[a])
            linear[self.place[a]] += self.busy[a]
            before = int(self.before[a])
            while self.lengths.all() and sent[before] > ends[a] * (1 + ROUNDING):
                a, before = before, int(self.before[before])
                linear[self.place[a]] += self.busy[a]
        return PathTerms(linear, quadratic, fixed)

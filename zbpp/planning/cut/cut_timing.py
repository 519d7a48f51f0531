"""The makespans and the memory of many cuts under one timetable, at once.

A cut says how many layers each stage has. It changes how long actions take and what they hold, but neither
their order nor what they wait for: see zbpp/planning/longest_paths.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from zbpp.planning.longest_paths import Floats, LongestPaths, Numbers, Sending
from zbpp.schedule.costs import COST_NAMES, TIMES, Costs
from zbpp.schedule.dataflow_arrays import kinds_of
from zbpp.schedule.timetable import Op, PlanError, Timetable

_ADDED = ("f", "b", "w", "bw", "saved", "deferred", "static")  # of a stage's layers; comm is its last layer's


class Layers:
    """A model's layers, and the ranks that they are cut for.

    costs: of each layer, in order, at speed 1. speeds: of each rank; a rank of speed 2 takes half the time.
    """

    def __init__(self, costs: Sequence[Costs], speeds: Sequence[float]) -> None:
        """Raises PlanError for layers with other costs than numbers of one unit."""
        if not isinstance(costs, Sequence) or not costs or not all(isinstance(each, Costs) for each in costs):
            raise PlanError(f"layers={costs!r}: write a list with a Costs for each layer, in order")
        for number, each in enumerate(costs):
            if each.memory_unit != costs[0].memory_unit:
                raise PlanError(f"layers {number} and 0 have memory in different units: write one unit")
            for name in COST_NAMES:
                value = getattr(each, name)
                if isinstance(value, Sequence) or (name not in (*_ADDED, "comm") and value):
                    raise PlanError(
                        f"layer {number} has {name}={value!r}: a layer's costs are f, b, w, bw, comm, saved, "
                        "deferred and static, a number each"
                    )
            if each.lengths or each.slice_bounds or each.quadratic is not None:
                raise PlanError(
                    f"layer {number} has lengths or slices: write costs of whole, equal microbatches"
                )
            if each.links != costs[0].links:
                raise PlanError(f"layers {number} and 0 have different links: write the same for all")
        self.links = costs[0].links
        if self.links is not None and any(
            isinstance(each, Sequence) for each in (self.links.x, self.links.g)
        ):
            raise PlanError("layers have links whose x or g is a list: write one number for all boundaries")
        self.costs, self.speeds = list(costs), np.array(speeds, dtype=np.float64)
        values = {name: [self._value(each, name) for each in costs] for name in _ADDED}
        self._sums = {name: np.array([*accumulate(each, initial=0.0)]) for name, each in values.items()}
        self._comm = np.array([self._value(each, "comm") for each in costs])

    @staticmethod
    def _value(costs: Costs, name: str) -> float:
        value: Any = costs.whole if name == "bw" else getattr(costs, name)
        return float(value)

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def work(self) -> list[float]:
        """By layer, its F, B and W for one microbatch (ms, at speed 1)."""
        return [sum(self._value(each, name) for name in ("f", "b", "w")) for each in self.costs]

    @property
    def serial(self) -> float:
        """No microbatch takes longer (ms): all its actions on the slowest rank, and all its messages."""
        sums = sum(float(self._sums[name][-1]) for name in TIMES)
        links = 0.0 if self.links is None else self.links.longest
        return sums / float(self.speeds.min()) + 2 * (float(self._comm.sum()) + len(self) * links)

    def of_stages(self, name: str, cuts: Numbers, rank_of: Sequence[int]) -> Floats:
        """A cost of the stages: an array by stage and cut. cuts: the number of layers by cut and stage."""
        ends = np.cumsum(cuts, axis=1).T
        if name == "comm":
            return self._comm[ends - 1]
        sums = self._sums[name]
        found: Floats = sums[ends] - sums[ends - cuts.T]
        if name in TIMES:
            found /= self.speeds[list(rank_of)][:, None]
        return found

    def stage_costs(self, counts: Sequence[int], rank_of: Sequence[int]) -> Costs:
        """The costs of the stages of one cut, as `plan` and `simulate` take them."""
        cut = np.array([counts])
        numbers = {name: self.of_stages(name, cut, rank_of)[:, 0].tolist() for name in (*_ADDED, "comm")}
        return replace(Costs(**numbers), memory_unit=self.costs[0].memory_unit, links=self.links)


class CutTiming:
    """One timetable, timed for many cuts at once."""

    def __init__(self, timetable: Timetable, layers: Layers) -> None:
        self.timetable, self._layers, self._paths = timetable, layers, LongestPaths(timetable)
        rows, order = timetable.rows, self._paths.order
        kinds = np.concatenate([kinds_of(row) for row in rows])
        stages = np.concatenate([row.stages for row in rows])
        self._kinds, self._stages = kinds[order], stages[order]
        sender = self._paths.sender
        self._has_sender = sender != self._paths.none
        self._stage_of_sender = self._stages[np.where(self._has_sender, sender, 0)]
        self._kind_of_sender = self._kinds[np.where(self._has_sender, sender, 0)]
        self._latency, self._busy, queues = self._times_on_links()
        self._before = self._paths.sent_before(queues)
        self._levels = [_levels_of(timetable, rank) for rank in range(timetable.num_ranks)]

    def makespans(self, cuts: Numbers) -> Floats:
        """The makespan (ms) of each cut; the slices of a sequence take equally long."""
        rank_of, layers = self.timetable.rank_of, self._layers
        share = 1 / self.timetable.num_slices  # of a unit
        by_op = [share * layers.of_stages(name, cuts, rank_of) for name in _BY_OP]
        durations = np.stack(by_op, axis=1).reshape(-1, len(cuts))  # by kind and cut
        comm = share * layers.of_stages("comm", cuts, rank_of)[self._stage_of_sender]
        delays = np.where(self._has_sender[:, None], comm + self._latency[:, None], 0.0)
        sending = None
        if self._busy.any():
            busy = np.broadcast_to(self._busy[:, None], delays.shape)
            sending = Sending(busy, np.ones_like(busy, dtype=bool), self._before)
        makespans: Floats = self._paths.ends(durations[self._kinds], delays, sending).max(axis=0)
        return makespans

    def _times_on_links(self) -> tuple[Floats, Floats, Numbers]:
        """By action, the latency of the message that it waits for, how long its own one is busy (ms), and in
        which queue of its rank; -1: it sends none.
        """
        if self._layers.links is None:
            return np.zeros(len(self._kinds)), np.zeros(len(self._kinds)), np.full(len(self._kinds), -1)
        unit = self._layers.links.scaled(1 / self.timetable.num_slices)
        routes = unit.routes(self.timetable.rank_of)
        latency = np.array([each.latency if each else 0.0 for each in routes])
        busy = np.array([each.busy if each else 0.0 for each in routes])
        queues = np.array([each.queue if each else -1 for each in routes])
        return latency[self._kind_of_sender] * self._has_sender, busy[self._kinds], queues[self._kinds]

    def peaks(self, cuts: Numbers) -> Floats:
        """The most that each rank holds: an array by rank and cut, in the unit of the layers' costs."""
        rank_of, peaks = self.timetable.rank_of, []
        saved, deferred, static = (
            self._layers.of_stages(name, cuts, rank_of) for name in ("saved", "deferred", "static")
        )
        for own, (held, pending) in zip(self._stages_of_ranks(), self._levels, strict=True):
            levels = (held @ saved[own] + pending @ deferred[own]) / self.timetable.num_slices
            peaks.append(levels.max(axis=0) + static[own].sum(axis=0))
        return np.array(peaks)

    def _stages_of_ranks(self) -> list[list[int]]:
        return [[*self.timetable.stages_of(rank)] for rank in range(self.timetable.num_ranks)]


_BY_OP = tuple({Op.F: "f", Op.B: "b", Op.W: "w", Op.BW: "bw"}[op] for op in Op)


def _levels_of(timetable: Timetable, rank: int) -> tuple[Floats, Floats]:
    """How many units a rank's stages hold from F to B, and from B to W, at different times."""
    row, own = timetable.rows[rank], [*timetable.stages_of(rank)]
    on_stage = row.stages[:, None] == np.array(own)
    saved = (row.ops == Op.F) * 1 - ((row.ops == Op.B) | (row.ops == Op.BW)) * 1
    deferred = (row.ops == Op.B) * 1 - (row.ops == Op.W) * 1
    levels = [np.cumsum(on_stage * change[:, None], axis=0) for change in (saved, deferred)]
    different = np.unique(np.concatenate(levels, axis=1), axis=0).astype(np.float64)
    return different[:, : len(own)], different[:, len(own) :]

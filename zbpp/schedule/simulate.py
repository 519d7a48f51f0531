"""When each action would run: the simulator, and with it THE validator of timetables."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.schedule.costs import ACTIVATIONS, Costs, StageCosts
from zbpp.schedule.dataflow import Value, consumes
from zbpp.schedule.dataflow_arrays import Numbers, Values, kinds_of
from zbpp.schedule.timetable import Op, PlanError, Row, Timetable

Floats = npt.NDArray[np.float64]

_NONE = -1  # no value's number


class Transfer(NamedTuple):
    """A message between two ranks: when it was given away, and when it had arrived, in ms."""

    value: Value
    sender: int
    receiver: int
    sent: float
    arrived: float


@dataclass(frozen=True)
class Timeline:
    """When each action ran, predicted or measured: per rank, times in ms in the row's order.

    peak_memory: per rank, the highest level after an action, in memory_unit, which is that of the costs;
    where the timeline was measured, the most bytes that the rank's process has held.
    Of messages (see `transfers_of`): message_ms, their times by the stage that they leave, where they are
    predicted; transfers where they were measured.
    """

    timetable: Timetable
    starts: tuple[Floats, ...]
    ends: tuple[Floats, ...]
    peak_memory: tuple[float, ...]
    message_ms: tuple[float, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    memory_unit: str = ACTIVATIONS
    measured: bool = False

    @property
    def makespan(self) -> float:
        """Last end minus first start over all ranks."""
        return float(max(end[-1] for end in self.ends) - min(start[0] for start in self.starts))

    def span(self, rank: int) -> float:
        """Last end minus first start of one rank."""
        return float(self.ends[rank][-1] - self.starts[rank][0])

    def idle(self, rank: int) -> float:
        """The time within its span in which a rank runs nothing."""
        return self.span(rank) - float((self.ends[rank] - self.starts[rank]).sum())

    @property
    def max_span(self) -> float:
        """The largest span: the cost of the Zero Bubble paper (arXiv:2401.10241)."""
        return max(map(self.span, self._ranks))

    @property
    def bubble(self) -> float:
        """The largest idle time of a rank within its own span."""
        return max(map(self.idle, self._ranks))

    @property
    def bubble_rate(self) -> float:
        """The largest idle / span of a rank."""
        return max(self.idle(rank) / (self.span(rank) or 1.0) for rank in self._ranks)

    @property
    def _ranks(self) -> range:
        return range(self.timetable.num_ranks)


def simulate(timetable: Timetable, costs: Costs | None = None) -> Timeline:
    """Run each row in order, every action as soon as its inputs have arrived.

    Times in ms. A message takes costs.comm and overlaps computation. A timetable of F's
    alone is legal: it is what evaluation runs.
    Raises PlanError if an action repeats or is missing, if microbatches of a stage don't
    ascend, or if the timetable can never finish.
    """
    for row in timetable.rows:
        _check_row(row, timetable.num_microbatches)
    _check_kind(timetable)
    costs = costs or Costs()
    stage_costs = costs.per_stage(timetable.num_stages)
    ranks = _run(timetable, stage_costs)
    return Timeline(
        timetable,
        starts=tuple(np.frombuffer(rank.starts) for rank in ranks),
        ends=tuple(np.frombuffer(rank.ends) for rank in ranks),
        peak_memory=tuple(_peak(row, stage_costs) for row in timetable.rows),
        message_ms=tuple(stage_costs.comm),
        memory_unit=costs.memory_unit,
    )


def _check_row(row: Row, num_microbatches: int) -> None:
    """F's; B's and BW's; W's and BW's of each stage: every microbatch once, ascending."""
    for stage in np.unique(row.stages).tolist():
        ops = row.ops[row.stages == stage]
        microbatches = row.microbatches[row.stages == stage]
        _check_ascending(stage, "F", microbatches[ops == Op.F], num_microbatches)
        if (ops == Op.F).all():
            continue
        for name, kinds in (("B", (Op.B, Op.BW)), ("W", (Op.W, Op.BW))):
            _check_ascending(stage, name, microbatches[np.isin(ops, kinds)], num_microbatches)


def _check_ascending(stage: int, name: str, microbatches: npt.NDArray[np.int32], expected: int) -> None:
    names = {"F": "F", "B": "B or BW", "W": "W or BW"}[name]
    found, counts = np.unique(microbatches, return_counts=True)
    repeated = found[counts > 1]
    if len(repeated):
        raise PlanError(f"{stage}{name}{repeated[0]} repeats: a stage has one {names} per microbatch")
    if len(found) < expected:  # nothing here is as long as the largest microbatch that a text can name
        missing = next((i for i, microbatch in enumerate(found.tolist()) if i != microbatch), len(found))
        raise PlanError(f"{stage}{name}{missing} is missing: a stage has one {names} per microbatch")
    if (np.diff(microbatches) > 0).all():
        return
    late = int(np.flatnonzero(np.diff(microbatches) < 0)[0])
    raise PlanError(
        f"{stage}{name}{microbatches[late + 1]} comes after {stage}{name}{microbatches[late]}: "
        f"{names} of a stage must ascend in microbatch, so that its sums have one order"
    )


def _check_kind(timetable: Timetable) -> None:
    trained: set[int] = set()
    for row in timetable.rows:
        trained |= set(np.unique(row.stages[row.ops != Op.F]).tolist())
    if trained and len(trained) < timetable.num_stages:
        lacking = min(set(range(timetable.num_stages)) - trained)
        raise PlanError(f"stage {lacking} has no backward, but stage {min(trained)} has one")


class _Rank:
    """One rank on its way through its row.

    A value made and used on one rank needs no clock: it is there if its producer stands earlier in
    the row. What comes from elsewhere has to be waited for; by the data-flow table an action
    consumes at most one such value and produces at most one for another rank.
    """

    def __init__(self, timetable: Timetable, rank: int, values: Values, costs: StageCosts) -> None:
        row = timetable.rows[rank]
        made_at, made = values.produced_in(row)
        used_at, used = values.consumed_in(row)
        _, here, there = np.intersect1d(made, used, assume_unique=True, return_indices=True)
        too_early = used_at[there][used_at[there] <= made_at[here]]
        leaves = np.array(timetable.rank_of)[values.stages(made)] != rank
        self.rank, self.row, self.values = rank, row, values
        self.stops_at = int(too_early.min(initial=len(row)))
        self.awaited = _scattered(len(row), np.delete(used_at, there), np.delete(used, there))
        self.given = _scattered(len(row), made_at[leaves], made[leaves])
        self.durations = np.array([costs.duration[op] for op in Op]).T.ravel()[kinds_of(row)]
        self.delays = np.array(costs.comm)[row.stages]
        self.starts, self.ends = array("d"), array("d")

    def run(self, arrival: list[float | None], waiting: dict[int, int], awake: list[int]) -> Iterator[int]:
        """Run the row; yield each value that isn't there yet, wake whoever waits for what is made."""
        clock = 0.0
        columns = (self.awaited, self.durations, self.given, self.delays)
        # As buffers: lists of all ranks' numbers would take gigabytes.
        steps = zip(*(column[: self.stops_at].data for column in columns), strict=True)
        for needs, duration, gives, delay in steps:
            if needs != _NONE:
                while (arrived := arrival[needs]) is None:
                    yield needs
                clock = max(clock, arrived)
            self.starts.append(clock)
            clock += duration
            self.ends.append(clock)
            if gives != _NONE:
                arrival[gives] = clock + delay
                if gives in waiting:
                    awake.append(waiting.pop(gives))

    def complaint(self, arrival: list[float | None]) -> str:
        """What a rank that can't go on waits for."""
        done = len(self.ends)
        _, made = self.values.produced_in(self.row[:done])
        missing = [
            value
            for value in consumes(self.row[done])
            if (number := self.values.number(value)) not in made and arrival[number] is None
        ]
        return f"rank {self.rank} waits in {self.row[done]} for {', '.join(map(str, missing))}"


def _scattered(length: int, positions: Numbers, numbers: Numbers) -> npt.NDArray[np.int64]:
    """For each action of a row the number of its value, or _NONE."""
    column = np.full(length, _NONE, dtype=np.int64)
    column[positions] = numbers
    return column


def _run(timetable: Timetable, costs: StageCosts) -> list[_Rank]:
    """Let each rank run until it waits for a value; whoever produces that value wakes it."""
    values = Values(timetable.num_stages, timetable.num_microbatches)
    ranks = [_Rank(timetable, rank, values, costs) for rank in range(timetable.num_ranks)]
    arrival: list[float | None] = [None] * len(values)
    waiting: dict[int, int] = {}  # value -> the rank that waits for it
    awake = list(range(timetable.num_ranks))
    running = [rank.run(arrival, waiting, awake) for rank in ranks]
    while awake:
        rank = awake.pop()
        value = next(running[rank], None)
        if value is not None:
            waiting[value] = rank
    stuck = [rank.complaint(arrival) for rank in ranks if len(rank.ends) < len(rank.row)]
    if stuck:
        raise PlanError(f"the timetable cannot proceed: {'; '.join(stuck)}")
    return ranks


def _peak(row: Row, costs: StageCosts) -> float:
    change = np.zeros(len(row))
    for op, per_stage in costs.memory.items():
        chosen = row.ops == op
        change[chosen] = np.asarray(per_stage)[row.stages[chosen]]
    return float(np.cumsum(change).max())

"""When each action would run: the simulator, and with it THE validator of timetables."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.dataflow import VALUE_NAMES, Value, consumes, produces
from zbpp.schedule.timetable import Action, Op, PlanError, Row, Timetable

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """When each action ran, predicted or measured: per rank, times in ms in the row's order.

    peak_memory: per rank, the highest level after an action, in the unit of the costs.
    """

    timetable: Timetable
    starts: tuple[Floats, ...]
    ends: tuple[Floats, ...]
    peak_memory: tuple[float, ...]

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
    stage_costs = (costs or Costs()).per_stage(timetable.num_stages)
    ranks = _run(timetable, stage_costs)
    return Timeline(
        timetable,
        starts=tuple(np.array(rank.starts) for rank in ranks),
        ends=tuple(np.array(rank.ends) for rank in ranks),
        peak_memory=tuple(_peak(row, stage_costs) for row in timetable.rows),
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
    """One rank on its way through its row. Values are numbered: consecutive in the microbatch."""

    def __init__(self, timetable: Timetable, rank: int, costs: StageCosts) -> None:
        self.rank, self.row = rank, timetable.rows[rank]
        self.shape = (timetable.num_stages, timetable.num_microbatches)
        self.entries = {
            (stage, int(op)): self._entry(Action(stage, op, 0), timetable.rank_of, costs)
            for stage in timetable.stages_of(rank)
            for op in Op
        }
        self.steps = list(
            zip(self.row.stages.tolist(), self.row.ops.tolist(), self.row.microbatches.tolist(), strict=True)
        )
        self.clock = 0.0
        self.starts: list[float] = []
        self.ends: list[float] = []

    def _entry(self, action: Action, rank_of: tuple[int, ...], costs: StageCosts) -> _Entry:
        made = produces(action, self.shape[0])
        return _Entry(
            costs.duration[action.op][action.stage],
            [_number(value, self.shape) for value in consumes(action)],
            [
                (
                    _number(value, self.shape),
                    0.0 if rank_of[value.stage] == self.rank else costs.comm[action.stage],
                )
                for value in made
            ],
        )

    def advance(self, arrival: list[float | None], waiting: dict[int, int], awake: list[int]) -> None:
        """Run until the row ends or a value is missing; wake whoever waited for what was made."""
        for stage, op, microbatch in itertools.islice(self.steps, len(self.ends), None):
            duration, needs, gives = self.entries[stage, op]
            start = self.clock
            for first in needs:
                arrived = arrival[first + microbatch]
                if arrived is None:
                    waiting[first + microbatch] = self.rank
                    return
                start = max(start, arrived)
            self.clock = start + duration
            self.starts.append(start)
            self.ends.append(self.clock)
            for first, delay in gives:
                value = first + microbatch
                arrival[value] = self.clock + delay
                if value in waiting:
                    awake.append(waiting.pop(value))

    def complaint(self, arrival: list[float | None]) -> str:
        """What a rank that can't go on waits for."""
        action = self.row[len(self.ends)]
        missing = [value for value in consumes(action) if arrival[_number(value, self.shape)] is None]
        return f"rank {self.rank} waits in {action} for {', '.join(map(str, missing))}"


class _Entry(NamedTuple):
    duration: float
    needs: list[int]  # number of each consumed value at microbatch 0
    gives: list[tuple[int, float]]  # the same for produced values, with the message's time


def _number(value: Value, shape: tuple[int, int]) -> int:
    num_stages, num_microbatches = shape
    kind = VALUE_NAMES.index(value.name)
    return (kind * num_stages + value.stage) * num_microbatches + value.microbatch


def _run(timetable: Timetable, costs: StageCosts) -> list[_Rank]:
    """Let each rank run until it waits for a value; whoever produces that value wakes it."""
    arrival: list[float | None] = [None] * (
        len(VALUE_NAMES) * timetable.num_stages * timetable.num_microbatches
    )
    waiting: dict[int, int] = {}
    ranks = [_Rank(timetable, rank, costs) for rank in range(timetable.num_ranks)]
    awake = list(range(timetable.num_ranks))
    while awake:
        ranks[awake.pop()].advance(arrival, waiting, awake)
    if waiting:
        stuck = [ranks[rank].complaint(arrival) for rank in sorted(waiting.values())]
        raise PlanError(f"the timetable cannot proceed: {'; '.join(stuck)}")
    return ranks


def _peak(row: Row, costs: StageCosts) -> float:
    change = np.zeros(len(row))
    for op, per_stage in costs.memory.items():
        chosen = row.ops == op
        change[chosen] = np.asarray(per_stage)[row.stages[chosen]]
    return float(np.cumsum(change).max())

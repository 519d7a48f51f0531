"""When each action of a timetable runs, given its costs. Simulating a timetable also checks it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.dataflow import consumes
from zbpp.schedule.dataflow_arrays import Numbers, Values
from zbpp.schedule.exchange import hide_in_exchanges
from zbpp.schedule.offload import RankCopies, RankOffload, changes_of
from zbpp.schedule.reductions import Reduction, predicted_reductions
from zbpp.schedule.row_costs import RowCosts
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import Op, PlanError, Row, Timetable, turned, unit_of

_NONE = -1  # stands for "no value" where the number of a value is expected


def simulate(
    timetable: Timetable,
    costs: Costs | None = None,
    offload: Sequence[RankOffload] = (),
    *,
    num_steps: int = 1,
) -> Timeline:
    """Run each row in order, every action as soon as its inputs have arrived.

    Times are in ms. A message takes costs.comm and overlaps computation. So does a stage's reduction, which
    takes costs.reduce: it starts when the stage's last W or BW has ended, and the rank's reduction before it.
    A timetable of F's alone is legal: evaluation runs it.
    During the exchanges inside F and B a rank runs pending W's (exchange.py): these are shorter at their
    places, F and B are not.

    offload: for each rank, its round trips (`choose_offload`). An action waits for a copy that is late.
    peak_memory counts the device memory only.

    num_steps: the number of consecutive steps, run with post-validation (zbpp.PostValidation, or
    optimizer.validation=after) and without a redone update. A rank begins a step when it has ended the
    previous step, reductions included. It waits at its gate (gate.py) until all ranks have ended the previous
    step. This wait costs no time beyond the wait for messages, since the first B needs an F of every rank.
    The update of the weights and the exchange of norms take no time. The Timeline is one of
    `timetable.repeated(num_steps)`. With an update that waits for all ranks, n steps take n times the
    makespan of one.

    Raises PlanError if an action repeats or is missing, if a stage's actions are not in the order of
    `check_row`, if the timetable can never finish, or for another number of lengths than there are units.
    """
    for row in timetable.rows:
        check_row(row, timetable.num_units)
    check_backwards(timetable)
    costs = costs or Costs()
    stage_costs = costs.per_stage(timetable.num_stages, timetable.num_units)
    if num_steps < 1:
        raise PlanError(f"num_steps={num_steps}: write 1 or more")
    placed = [*offload] or [()] * timetable.num_ranks
    copies = [RankCopies(rank, each, stage_costs) if each else None for rank, each in enumerate(placed)]
    ranks = _run(timetable, stage_costs, copies)
    reductions = list(_reductions(ranks, stage_costs.reduce))
    for _ in range(num_steps - 1):
        _run_step(ranks, _ends(ranks, reductions))
        reductions += _reductions(ranks, stage_costs.reduce)
    return Timeline(
        timetable if num_steps == 1 else timetable.repeated(num_steps),
        starts=tuple(np.frombuffer(rank.starts) for rank in ranks),
        ends=tuple(np.frombuffer(rank.ends) for rank in ranks),
        peak_memory=tuple(
            peak_memory(row, stage_costs, each) for row, each in zip(timetable.rows, placed, strict=True)
        ),
        message_ms=tuple(stage_costs.comm),
        lengths=stage_costs.lengths * num_steps,
        reductions=tuple(sorted(reductions, key=lambda each: each.rank)),
        copies=tuple(span for each in copies if each is not None for span in each.spans),
        exposed=tuple(np.tile(rank.exposed, num_steps) for rank in ranks)
        if any(stage_costs.exchange)
        else (),
        memory_unit=costs.memory_unit,
    )


class _OfStages(NamedTuple):
    """What all ranks share, made once."""

    rank_of: npt.NDArray[np.int64]
    costs: RowCosts


class _RankRun:
    """One rank's run through its row.

    A value that is made and consumed on the same rank takes no time to arrive; its producer only has to stand
    earlier in the row. A value from another rank has to be waited for. By the data-flow table an action
    consumes at most one value from another rank, and makes at most one for another rank.

    stops_at: the position of the first action that stands before the producer of its input; the length of the
    row if there is none.
    awaited, given: for each action the number of the value from, and for, another rank; or _NONE.
    """

    def __init__(
        self,
        timetable: Timetable,
        rank: int,
        values: Values,
        stages: _OfStages,
        copies: RankCopies | None = None,
    ) -> None:
        row = timetable.rows[rank]
        made_at, made = values.produced_in(row)
        used_at, used = values.consumed_in(row)
        _, in_made, in_used = np.intersect1d(made, used, assume_unique=True, return_indices=True)
        local_made_at, local_used_at = made_at[in_made], used_at[in_used]
        too_early = local_used_at[local_used_at <= local_made_at]
        leaves = stages.rank_of[values.stages(made)] != rank
        self.rank, self.row, self.values, self.copies = rank, row, values, copies
        self.stops_at = int(too_early.min(initial=len(row)))
        self.awaited = _by_action(len(row), np.delete(used_at, in_used), np.delete(used, in_used))
        self.given = _by_action(len(row), made_at[leaves], made[leaves])
        self.durations = stages.costs.durations(row)
        self.exposed = np.zeros(0)  # exchange in each action, where there are exchanges
        if stages.costs.has_exchange:
            exchange = stages.costs.exchange(row)
            self.durations, self.exposed = hide_in_exchanges(row, self.durations, exchange)
        self.delays = stages.costs.delays(row)
        self.starts, self.ends = array("d"), array("d")

    def run(
        self, begin: float, arrival: list[float | None], waiting: dict[int, int], awake: list[int]
    ) -> Iterator[int]:
        """Run the row as far as `stops_at`. Yield the number of each value that has to be waited for.

        begin: when it may begin. arrival: for each value when it arrives, None until it is made. waiting:
        value -> the rank that waits for it. awake: the ranks that can go on; a rank is added once its value
        is made.
        """
        clock, copies = begin, self.copies
        columns = (self.awaited, self.durations, self.given, self.delays)
        # Iterated as memoryviews (.data): as lists, the numbers of all ranks would take gigabytes.
        steps = zip(*(column[: self.stops_at].data for column in columns), strict=True)
        for position, (needs, duration, gives, delay) in enumerate(steps):
            if copies is not None:
                clock = copies.run(position, True, clock)
            if needs != _NONE:
                while (arrived := arrival[needs]) is None:
                    yield needs
                clock = max(clock, arrived)
            if copies is not None:
                clock = copies.run(position, False, clock)
            self.starts.append(clock)
            clock += duration
            self.ends.append(clock)
            if gives != _NONE:
                arrival[gives] = clock + delay
                if gives in waiting:
                    awake.append(waiting.pop(gives))

    def complaint(self, arrival: list[float | None]) -> str:
        """Say what the rank waits for, once it can't go on."""
        done = len(self.ends)
        _, made = self.values.produced_in(self.row[:done])
        missing = [
            value
            for value in consumes(self.row[done])
            if (number := self.values.number(value)) not in made and arrival[number] is None
        ]
        return f"rank {self.rank} waits in {self.row[done]} for {', '.join(map(str, missing))}"


def _by_action(length: int, positions: Numbers, numbers: Numbers) -> npt.NDArray[np.int64]:
    """An array with one entry per action: `numbers` at `positions`, _NONE elsewhere."""
    column = np.full(length, _NONE, dtype=np.int64)
    column[positions] = numbers
    return column


def _run(timetable: Timetable, costs: StageCosts, copies: Sequence[RankCopies | None]) -> list[_RankRun]:
    """Run one step, which begins at 0 ms."""
    values = Values.of(timetable)
    stages = _OfStages(np.array(timetable.rank_of), RowCosts(costs))
    ranks = [_RankRun(timetable, rank, values, stages, copies[rank]) for rank in range(timetable.num_ranks)]
    arrival = _run_step(ranks, [0.0] * len(ranks))
    stuck = [rank.complaint(arrival) for rank in ranks if len(rank.ends) < len(rank.row)]
    if stuck:
        raise PlanError(f"the timetable cannot proceed: {'; '.join(stuck)}")
    return ranks


def _run_step(ranks: list[_RankRun], begins: Sequence[float]) -> list[float | None]:
    """Let each rank run until it has to wait for a value; the rank that makes the value wakes it.

    begins: for each rank, when it may begin. Returns when each value arrives.
    """
    arrival: list[float | None] = [None] * len(ranks[0].values)
    waiting: dict[int, int] = {}
    awake = list(range(len(ranks)))
    running = [rank.run(begin, arrival, waiting, awake) for rank, begin in zip(ranks, begins, strict=True)]
    while awake:
        rank = awake.pop()
        value = next(running[rank], None)
        if value is not None:
            waiting[value] = rank
    return arrival


def _ends(ranks: list[_RankRun], reductions: list[Reduction]) -> list[float]:
    """When each rank has ended all that it has begun, reductions included."""
    ends = [rank.ends[-1] for rank in ranks]
    for each in reductions:
        ends[each.rank] = max(ends[each.rank], each.end)
    return ends


def _reductions(ranks: list[_RankRun], reduce: list[float]) -> Iterator[Reduction]:
    """All ranks' reductions in their last step; without such costs no row is looked through."""
    for each in ranks if any(reduce) else ():
        ends = np.array(each.ends[-len(each.row) :])
        yield from predicted_reductions(each.rank, each.row, ends, reduce)


def check_row(row: Row, num_units: int) -> None:
    """A stage has per unit one F, one B or BW, one W or BW, or F alone, and each kind is in order.

    F's ascend in units; B's and BW's, and W's and BW's, ascend in microbatch and descend in slice.
    """
    by_stage = np.argsort(row.stages, kind="stable")
    for positions in np.split(by_stage, np.flatnonzero(np.diff(row.stages[by_stage])) + 1):
        own = row.select(positions)
        stage = int(own.stages[0])
        if (own.ops == Op.F).all():
            checked: tuple[tuple[Op, ...], ...] = ((Op.F,),)
        else:
            checked = ((Op.F,), (Op.B, Op.BW), (Op.W, Op.BW))
        for ops in checked:
            _check_order(stage, ops, own.select(np.isin(own.ops, ops)), num_units)


def _check_order(stage: int, ops: tuple[Op, ...], row: Row, expected: int) -> None:
    """row: the stage's actions with one of these ops."""
    names, per = " or ".join(map(str, ops)), "microbatch" if row.num_slices == 1 else "slice"

    def text(unit: int) -> str:
        return f"{stage}{ops[0]}{unit_of(int(unit), row.num_slices)}"

    found, counts = np.unique(row.microbatches, return_counts=True)
    repeated = found[counts > 1]
    if len(repeated):
        raise PlanError(f"{text(repeated[0])} repeats: a stage has one {names} per {per}")
    # No array here is as long as `expected`: a short text can name microbatch 2147483647.
    if len(found) < expected:
        missing = next((i for i, unit in enumerate(found.tolist()) if i != unit), len(found))
        raise PlanError(f"{text(missing)} is missing: a stage has one {names} per {per}")
    places = row.microbatches if ops == (Op.F,) else turned(row.microbatches, row.num_slices)
    early = np.flatnonzero(np.diff(places) < 0)
    if len(early):
        one, other = (text(unit) for unit in row.microbatches[early[0] : early[0] + 2])
        raise PlanError(f"{other} comes after {one}: {names} of a stage must {_law(ops, row.num_slices)}")


def _law(ops: tuple[Op, ...], num_slices: int) -> str:
    """The order of a stage's actions, and the reason for it."""
    if num_slices == 1:
        return "ascend in microbatch, so that gradients are always summed in the same order"
    if ops == (Op.F,):
        return "ascend in microbatch and slice: a slice needs the keys and values of the slices before it"
    return (
        "ascend in microbatch and descend in slice: a slice needs the gradients of its keys and values that "
        "the slices behind it make"
    )


def check_backwards(timetable: Timetable) -> None:
    """Either all stages have backwards, or none has."""
    with_backward: set[int] = set()
    for row in timetable.rows:
        with_backward |= set(np.unique(row.stages[row.ops != Op.F]).tolist())
    without = set(range(timetable.num_stages)) - with_backward
    if with_backward and without:
        raise PlanError(f"stage {min(without)} has no backward, but stage {min(with_backward)} has one")


def peak_memory(row: Row, costs: StageCosts, offload: RankOffload = ()) -> float:
    """The most that the rank holds after any action of its row or any Fetch, and all the time."""
    change = np.zeros(len(row))
    stages, place = np.unique(row.stages, return_inverse=True)
    for op, per_stage in costs.memory.items():
        chosen = row.ops == op
        change[chosen] = np.array([per_stage[stage] for stage in stages.tolist()])[place[chosen]]
    if costs.lengths:
        change *= np.array(costs.lengths)[row.microbatches]
    if offload:
        places, amounts = zip(*changes_of(offload, costs), strict=True)
        change = np.insert(change, places, amounts)
    static: float = sum(costs.static[stage] for stage in stages.tolist())
    return float(np.cumsum(change).max()) + static

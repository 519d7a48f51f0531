"""When each action of a timetable runs, given its costs. Simulating a timetable also checks it.

Here are F, B, W, BW and the messages between ranks. What else a step has is in interpret/.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from zbpp.schedule.check import check_actions
from zbpp.schedule.costs import Costs
from zbpp.schedule.dataflow import consumes
from zbpp.schedule.dataflow_arrays import Numbers, Values
from zbpp.schedule.interpret.reductions import predicted_reductions
from zbpp.schedule.row_costs import RowCosts, RowTimes
from zbpp.schedule.timeline import Floats, Timeline
from zbpp.schedule.timetable import PlanError, Timetable

_NONE = -1  # stands for "no value" where the number of a value is expected


def simulate(timetable: Timetable, costs: Costs | None = None) -> Timeline:
    """Run each row in order, every action as soon as its inputs have arrived.

    Times are in ms. A message takes costs.comm, and overlaps computation. A timetable of F's alone is legal:
    evaluation runs it.

    Raises PlanError if an action repeats or is missing, if a stage's actions are not in the order of
    `check_row`, if the timetable can never finish, or for another number of lengths than there are units.

    Costs may say more. With costs.links a message waits while its link is occupied, too. With costs.reduce a
    stage's reduction runs beside the actions: it starts when the stage's last W or BW has ended, and the
    rank's reduction before it. With costs.exchange a rank runs pending W's while an F or B waits for an
    exchange (interpret/exchange.py). What has been run there shortens the W at its own place in the row; F
    and B take as long as without it.
    """
    check_actions(timetable)
    costs = costs or Costs()
    stage_costs = costs.of_units(timetable)
    row_costs = RowCosts(stage_costs)
    times = [row_costs.times(row) for row in timetable.rows]
    starts, ends, delays = _run(timetable, times)
    return Timeline(
        timetable,
        starts,
        ends,
        peak_memory=tuple(row_costs.peak_memory(row) for row in timetable.rows),
        delays=delays,
        lengths=stage_costs.lengths,
        reductions=tuple(predicted_reductions(timetable.rows, ends, stage_costs.reduce)),
        exposed=tuple(each.exposed for each in times) if row_costs.has_exchange else (),
        memory_unit=costs.memory_unit,
    )


def _run(timetable: Timetable, times: Sequence[RowTimes]) -> tuple[tuple[Floats, ...], ...]:
    """When each action of each row starts, when it ends, and how much later its message arrives.

    Raises PlanError if a rank can't finish.
    """
    values, rank_of = Values.of(timetable), np.array(timetable.rank_of)
    ranks = [_RankRun(timetable, rank, values, rank_of, each) for rank, each in enumerate(times)]
    messages = Messages(len(values), len(ranks))
    messages.run([rank.run(messages) for rank in ranks])
    stuck = [rank.complaint(messages) for rank in ranks if len(rank.ends) < len(rank.row)]
    if stuck:
        raise PlanError(f"the timetable cannot proceed: {'; '.join(stuck)}")
    starts = tuple(np.frombuffer(rank.starts) for rank in ranks)
    ends = tuple(np.frombuffer(rank.ends) for rank in ranks)
    return starts, ends, tuple(rank.delays(messages) for rank in ranks)


class Messages:
    """The messages of a step while its ranks run.

    arrival: for each value when it arrives (ms); None until it is made, and for ever if it is no message.
    waiting: {value: the rank that waits for it}. awake: the ranks that can go on.
    """

    def __init__(self, num_values: int, num_ranks: int) -> None:
        self.arrival: list[float | None] = [None] * num_values
        self.waiting: dict[int, int] = {}
        self.awake = list(range(num_ranks))

    def run(self, ranks: Sequence[Iterator[int]]) -> None:
        """Let each rank run until it has to wait for a value, which it yields; whoever makes it wakes it."""
        while self.awake:
            rank = self.awake.pop()
            value = next(ranks[rank], None)
            if value is not None:
                self.waiting[value] = rank

    def send(self, value: int, arrives: float) -> None:
        """Note when a value arrives; a rank that waits for it can go on."""
        self.arrival[value] = arrives
        if value in self.waiting:
            self.awake.append(self.waiting.pop(value))


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
        self, timetable: Timetable, rank: int, values: Values, rank_of: Numbers, times: RowTimes
    ) -> None:
        row = timetable.rows[rank]
        made_at, made = values.produced_in(row)
        used_at, used = values.consumed_in(row)
        _, in_made, in_used = np.intersect1d(made, used, assume_unique=True, return_indices=True)
        local_made_at, local_used_at = made_at[in_made], used_at[in_used]
        too_early = local_used_at[local_used_at <= local_made_at]
        leaves = rank_of[values.stages(made)] != rank
        self.rank, self.row, self.values, self.times = rank, row, values, times
        self.stops_at = int(too_early.min(initial=len(row)))
        self.awaited = _by_action(len(row), np.delete(used_at, in_used), np.delete(used, in_used))
        self.given = _by_action(len(row), made_at[leaves], made[leaves])
        self.starts, self.ends = array("d"), array("d")

    def run(self, messages: Messages) -> Iterator[int]:
        """Run the row as far as `stops_at`. Yield the number of each value that has to be waited for."""
        clock, arrival, send, outbox = 0.0, messages.arrival, messages.send, self.times.outbox()
        started, ended = self.starts.append, self.ends.append
        columns = (self.awaited, self.times.durations, self.given, self.times.delays)
        # Iterated as memoryviews (.data): as lists, the numbers of all ranks would take gigabytes.
        steps = zip(*(column[: self.stops_at].data for column in columns), strict=True)
        for position, (needs, duration, gives, delay) in enumerate(steps):
            if needs != _NONE:
                while (arrived := arrival[needs]) is None:
                    yield needs
                clock = max(clock, arrived)
            started(clock)
            clock += duration
            ended(clock)
            if gives != _NONE:
                gone = clock if outbox is None else outbox.send(position, clock)
                send(gives, gone + delay)

    def delays(self, messages: Messages) -> Floats:
        """How long after the end of each action its message arrives (ms)."""
        if not len(self.times.busy):
            return self.times.delays
        sent = np.flatnonzero(self.given != _NONE)
        found = np.zeros(len(self.row))
        found[sent] = [messages.arrival[value] for value in self.given[sent].tolist()]
        found[sent] -= np.frombuffer(self.ends)[sent]
        return found

    def complaint(self, messages: Messages) -> str:
        """Say what the rank waits for, once it can't go on."""
        done = len(self.ends)
        _, made = self.values.produced_in(self.row[:done])
        missing = [
            value
            for value in consumes(self.row[done])
            if (number := self.values.number(value)) not in made and messages.arrival[number] is None
        ]
        return f"rank {self.rank} waits in {self.row[done]} for {', '.join(map(str, missing))}"


def _by_action(length: int, positions: Numbers, numbers: Numbers) -> npt.NDArray[np.int64]:
    """An array with one entry per action: `numbers` at `positions`, _NONE elsewhere."""
    column = np.full(length, _NONE, dtype=np.int64)
    column[positions] = numbers
    return column

"""When whole programs run: actions and messages, and what passes have put between them.

    an action                 takes its time (row_costs.py), once its values have arrived
    Send, Recv, Post, Release no time: a value arrives Costs.comm after its producer has ended, or
                              as long after it as Costs.links say
    Reduce, Reduced           Costs.reduce beside the actions; wait for its end
    Offload, Fetch            Costs.host beside the actions, one copy at a time
    Drop, Await               wait for the end of a copy
    Gate                      waits until all ranks have ended the step before
    every other instruction   no time: no cost says how long an update, or the W of a head, takes

The programs that `lower` makes take the times that `simulate` gives, to the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.dataflow import Value, consumes
from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.interpret.reductions import Stream
from zbpp.schedule.program import (
    Await,
    Drop,
    Fetch,
    Offload,
    PassGate,
    Program,
    Recv,
    Reduce,
    Reduced,
    Send,
    Transport,
)
from zbpp.schedule.row_costs import RowCosts
from zbpp.schedule.simulate import Messages
from zbpp.schedule.timeline import CopySpan, Reduction, Timeline
from zbpp.schedule.timetable import Action, PlanError, Timetable


def program_timeline(
    programs: Sequence[Program], costs: Costs | None = None, *, num_steps: int = 1
) -> Timeline:
    """The timeline of the programs of all ranks, run for `num_steps` consecutive steps.

    A rank begins a step when it has ended the step before, its reductions included. Programs with a Gate
    (post-validation) are meant: where the update of the weights waits for all ranks, n steps take n times
    the makespan of one. The Timeline is one of `Timetable.repeated(num_steps)`.
    peak_memory: of the device alone; what has been dropped to host memory does not count.

    Raises PlanError for num_steps below 1, and for another number of lengths than there are units.
    """
    if num_steps < 1:
        raise PlanError(f"num_steps={num_steps}: write 1 or more")
    costs = costs or Costs()
    timetable = Timetable(
        [[each for each in program.instructions if isinstance(each, Action)] for program in programs]
    )
    stage_costs = costs.of_units(timetable)
    row_costs = RowCosts(stage_costs)
    values = Values.of(timetable)
    ranks = [_RankRun(program, timetable, row_costs, stage_costs, values) for program in programs]
    for _ in range(num_steps):
        messages, gate = Messages(len(values), len(ranks)), max(rank.clock for rank in ranks)
        messages.run([rank.run(messages, gate) for rank in ranks])
    return Timeline(
        timetable if num_steps == 1 else timetable.repeated(num_steps),
        starts=tuple(np.array(rank.starts) for rank in ranks),
        ends=tuple(np.array(rank.ends) for rank in ranks),
        peak_memory=tuple(rank.peak_memory for rank in ranks),
        delays=tuple(np.array(rank.delays) for rank in ranks),
        lengths=stage_costs.lengths * num_steps,
        reductions=tuple(each for rank in ranks for each in rank.reductions),
        copies=tuple(each for rank in ranks for each in rank.copies),
        exposed=tuple(np.tile(rank.times.exposed, num_steps) for rank in ranks)
        if row_costs.has_exchange
        else (),
        memory_unit=costs.memory_unit,
    )


class _RankRun:
    """One rank's run through its program. clock: when it has ended what it has begun."""

    def __init__(
        self,
        program: Program,
        timetable: Timetable,
        row_costs: RowCosts,
        costs: StageCosts,
        values: Values,
    ) -> None:
        self.rank, row = program.rank, timetable.rows[program.rank]
        self._instructions, self._costs, self._values = program.instructions, costs, values
        self._received = {each.value for each in program.instructions if isinstance(each, Recv)}
        self.times = row_costs.times(row)
        self.peak_memory = row_costs.peak_memory(row, self._copied_memory())
        self.clock = 0.0
        self.starts, self.ends, self.delays = list[float](), list[float](), list[float]()
        self._outbox = self.times.outbox()
        self.reductions, self.copies = list[Reduction](), list[CopySpan]()
        self._reducing, self._copying = Stream(), Stream()
        self._copied: dict[tuple[Value, bool], float] = {}  # (value, is out) -> when the copy ends

    def run(self, messages: Messages, gate: float) -> Iterator[int]:
        """Run one step. Yield the number of each value to wait for. gate: when the rank may pass its Gate."""
        durations, delays, position = self.times.durations.tolist(), self.times.delays.tolist(), 0
        for each in self._instructions:
            match each:
                case Action():
                    for value in consumes(each):
                        if value in self._received:
                            number = self._values.number(value)
                            while (arrived := messages.arrival[number]) is None:
                                yield number
                            self._wait(arrived)
                    self.starts.append(self.clock)
                    self.clock += durations[position]
                    self.ends.append(self.clock)
                    self.delays.append(delays[position])
                    position += 1
                case Send(value, _):
                    made, outbox = self.ends[-1], self._outbox
                    gone = made if outbox is None else outbox.send(position - 1, made)
                    self.delays[-1] += gone - made
                    messages.send(self._values.number(value), gone + delays[position - 1])
                case PassGate():
                    self._wait(gate)
                case Reduce(stage) if self._costs.reduce[stage] > 0:
                    span = self._reducing.run(self.clock, self._costs.reduce[stage])
                    self.reductions.append(Reduction(stage, self.rank, *span))
                case Reduced():
                    self._wait(self._reducing.free)
                case Offload() | Drop() | Fetch() | Await():
                    self._copy(each)
        self._wait(self._reducing.free)

    def _wait(self, until: float) -> None:
        self.clock = max(self.clock, until)

    def _copy(self, each: Transport) -> None:
        """Start a copy, or wait for its end."""
        value, is_out = each.value, isinstance(each, Offload | Drop)
        if isinstance(each, Drop | Await):
            self._wait(self._copied[value, is_out])
            return
        taken = self._costs.host[value.stage] * self._costs.length(value.microbatch)
        start, end = self._copying.run(self.clock, taken)
        self._copied[value, is_out] = end
        self.copies.append(CopySpan(value, self.rank, is_out, start, end))

    def _copied_memory(self) -> dict[int, list[float]]:
        """{number of actions before it: by how much each Drop and Fetch changes the device memory}."""
        found, position = defaultdict[int, list[float]](list), 0
        for each in self._instructions:
            match each:
                case Action():
                    position += 1
                case Drop(value) | Fetch(value):
                    size = self._costs.held["saved"][value.stage] * self._costs.length(value.microbatch)
                    found[position].append(-size if isinstance(each, Drop) else size)
        return found

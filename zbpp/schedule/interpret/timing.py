"""When whole programs run: actions and messages, and what passes have put between them.

    an action                 takes its time (row_costs.py), once its values have arrived
    Send, Recv, Post, Release no time: a value arrives Costs.comm after its producer has ended, or
                              as long after it as Costs.links say
    Reduce, Reduced           Costs.reduce beside the actions; wait for its end
    every other instruction   what its `pass_time` does with the rank's clock; without one no time: no cost
                              says how long an update, or the W of a head, takes

The programs that `lower` makes take the times that `simulate` gives, to the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.dataflow import consumes
from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.interpret.reductions import Stream
from zbpp.schedule.program import (
    Program,
    Recv,
    Reduce,
    Reduced,
    Send,
)
from zbpp.schedule.row_costs import RowCosts
from zbpp.schedule.simulate import Messages
from zbpp.schedule.timeline import CopySpan, Reduction, Timeline
from zbpp.schedule.timetable import Action, PlanError, Row, Timetable


def program_timeline(
    programs: Sequence[Program], costs: Costs | None = None, *, num_steps: int = 1
) -> Timeline:
    """The timeline of the programs of all ranks, run for `num_steps` consecutive steps.

    A rank begins a step when it has ended the step before, its reductions included. Programs are meant that
    wait inside a step for the end of the step before: where each step waits for all ranks at its end, n steps
    take n times the makespan of one. The Timeline's timetable is `of_steps(timetable, num_steps)`.
    peak_memory: of the device alone.

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
    ranks = [RankClock(program, timetable, row_costs, stage_costs, values) for program in programs]
    for _ in range(num_steps):
        messages, ended = Messages(len(values), len(ranks)), max(rank.now for rank in ranks)
        messages.run([rank.run(messages, ended) for rank in ranks])
    return Timeline(
        timetable if num_steps == 1 else of_steps(timetable, num_steps),
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


def of_steps(timetable: Timetable, num_steps: int) -> Timetable:
    """The same actions once for each step: microbatch 0 of step 2 has the number 2 * num_microbatches."""
    first = np.arange(num_steps, dtype=np.int32) * timetable.num_units
    return Timetable(
        Row(
            np.tile(row.stages, num_steps),
            np.tile(row.ops, num_steps),
            (first[:, None] + row.microbatches).ravel(),
            timetable.num_slices,
        )
        for row in timetable.rows
    )


class RankClock:
    """One rank's run through its program.

    now: when it has ended what it has begun. last_step_ended: when all ranks have ended the step before.
    ended: {what an instruction has started: when it ends}. reductions, copies: see Timeline.
    """

    def __init__(
        self,
        program: Program,
        timetable: Timetable,
        row_costs: RowCosts,
        costs: StageCosts,
        values: Values,
    ) -> None:
        self.rank, row = program.rank, timetable.rows[program.rank]
        self._instructions, self.costs, self._values = program.instructions, costs, values
        self._received = {each.value for each in program.instructions if isinstance(each, Recv)}
        self.times = row_costs.times(row)
        self.peak_memory = row_costs.peak_memory(row, self._changed_memory())
        self.now = 0.0
        self.starts, self.ends, self.delays = list[float](), list[float](), list[float]()
        self._outbox = self.times.outbox()
        self.reductions, self.copies = list[Reduction](), list[CopySpan]()
        self._streams, self.last_step_ended = defaultdict[str, Stream](Stream), 0.0
        self.ended: dict[Hashable, float] = {}

    def run(self, messages: Messages, last_step_ended: float) -> Iterator[int]:
        """Run one step. Yield the number of each value to wait for."""
        self.last_step_ended = last_step_ended
        durations, delays, position = self.times.durations.tolist(), self.times.delays.tolist(), 0
        for each in self._instructions:
            match each:
                case Action():
                    for value in consumes(each):
                        if value in self._received:
                            number = self._values.number(value)
                            while (arrived := messages.arrival[number]) is None:
                                yield number
                            self.wait(arrived)
                    self.starts.append(self.now)
                    self.now += durations[position]
                    self.ends.append(self.now)
                    self.delays.append(delays[position])
                    position += 1
                case Send(value, _):
                    made, outbox = self.ends[-1], self._outbox
                    gone = made if outbox is None else outbox.send(position - 1, made)
                    self.delays[-1] += gone - made
                    messages.send(self._values.number(value), gone + delays[position - 1])
                case Reduce(stage) if self.costs.reduce[stage] > 0:
                    span = self.stream("reductions").run(self.now, self.costs.reduce[stage])
                    self.reductions.append(Reduction(stage, self.rank, *span))
                case Reduced():
                    self.wait(self.stream("reductions").free)
                case _ if hasattr(each, "pass_time"):
                    each.pass_time(self)
        self.wait(self.stream("reductions").free)

    def wait(self, until: float) -> None:
        """Do nothing until this time (ms)."""
        self.now = max(self.now, until)

    def stream(self, name: str) -> Stream:
        """What runs beside the actions, one piece after another, under this name."""
        return self._streams[name]

    def _changed_memory(self) -> dict[int, list[float]]:
        """{number of actions before it: by how much each instruction changes the device memory}."""
        found, position = defaultdict[int, list[float]](list), 0
        for each in self._instructions:
            if isinstance(each, Action):
                position += 1
            elif hasattr(each, "memory_change"):
                found[position].append(each.memory_change(self.costs))
        return found

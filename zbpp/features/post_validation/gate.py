"""How far each rank runs into a step before it waits for the norm of all gradients: up to its gate.

With post-validation a rank updates its weights before it knows the norm of all gradients. It begins the next
step with the new weights, and stops at its gate until it knows the norm. If the norm shows that the update
was wrong, all that ran before the gates is dropped and runs again. So only F's run before a gate, and before
its gate a rank receives no message that another rank sends behind that rank's own gate:

    rank 0   0F0 0F1 0F2 | 0B0 0F3 ...
    rank 1   1F0 1F1 | 1B0 1F2 ...       the gate stands before the rank's first B
    rank 2   2F0 | 2B0 2F1 ...

Each gate is as late as these two rules allow. In a program the gate is an instruction with a Fence (see
schedule/passes/posts.py), which stands before the receives of the action behind it:

    ... 0F3  Send x(1,3) to 1  Gate  Recv g(0,0) from 1  0B0 ...
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.interpret.memory import RankBytes
from zbpp.schedule.interpret.timing import RankClock
from zbpp.schedule.lower import Link, Programs
from zbpp.schedule.passes.posts import Fence
from zbpp.schedule.program import Instruction, Program, Reduce, Release, Send
from zbpp.schedule.timetable import Action, Op, Row, Timetable


class PassGate(NamedTuple):
    """Wait until the last update of the weights is known to be right: an instruction at the rank's gate."""

    fence: Fence

    def __str__(self) -> str:
        return "Gate"

    def pass_time(self, clock: RankClock) -> None:
        """Wait until all ranks have ended the step before."""
        clock.wait(clock.last_step_ended)

    def change_bytes(self, memory: RankBytes) -> None:
        """What the step before has left is dropped: its gradients, and the copies made before its update."""
        memory.drop_last_step()


def gate_of(programs: Programs, rank: int) -> Fence:
    """The gate of a rank, from the programs of all ranks."""
    timeline = programs.timeline
    positions = gate_positions(timeline.timetable)
    values = Values.of(timeline.timetable)
    sent, dropped = {}, []
    for sender in (sender for sender, receiver in programs.links if receiver == rank):
        link = Link(timeline, values, sender, rank)
        sent[sender] = num_sent = int((link.sent_at < positions[sender]).sum())
        num_received = int((link.received_at < positions[rank]).sum())
        times = timeline.ends[sender][link.sent_at[num_received:num_sent]].tolist()
        dropped += [(time, sender) for time in times]
    # In the order of their sends in one timeline, so that the waits can't form a circle.
    return Fence(positions[rank], sent, tuple([sender for _, sender in sorted(dropped)]))


def with_gate(program: Program, gate: Fence) -> Program:
    """A program with its gate."""
    place, position = 0, 0
    for number, each in enumerate(program.instructions, 1):
        if isinstance(each, Action):
            position += 1
        if position > gate.position:
            break
        if isinstance(each, Action | Send | Reduce | Release):
            place = number
    before, behind = program.instructions[:place], program.instructions[place:]
    between: list[Instruction] = [PassGate(gate)]
    return program._replace(instructions=(*before, *between, *behind))


def gate_positions(timetable: Timetable) -> tuple[int, ...]:
    """For each rank the number of actions before its gate."""
    values = Values.of(timetable)
    maker, made_at = np.zeros(len(values), dtype=np.int64), np.zeros(len(values), dtype=np.int64)
    for rank, row in enumerate(timetable.rows):
        positions, made = values.produced_in(row)
        maker[made], made_at[made] = rank, positions
    gates = np.array([_num_leading_forwards(row) for row in timetable.rows])
    consumed = [values.consumed_in(row[:gate]) for row, gate in zip(timetable.rows, gates, strict=True)]
    is_settled = False
    while not is_settled:
        is_settled = True
        for rank, (used_at, used) in enumerate(consumed):
            # An F that consumes a message from behind a gate has to stand behind its own rank's gate.
            late = used_at[made_at[used] >= gates[maker[used]]]
            if len(late) and late[0] < gates[rank]:
                gates[rank], is_settled = late[0], False
    return tuple(gates.tolist())


def _num_leading_forwards(row: Row) -> int:
    others = np.flatnonzero(row.ops != Op.F)
    return int(others[0]) if len(others) else len(row)

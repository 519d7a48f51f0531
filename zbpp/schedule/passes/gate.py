"""Inserts the Gate: the place where a rank learns whether its step has to begin again, see schedule/gate.py.

... 0F3  Send x(1,3) to 1  Gate  Recv g(0,0) from 1  0B0 ...      before the receives of the action behind it
"""

from __future__ import annotations

from zbpp.schedule.gate import Gate
from zbpp.schedule.program import Instruction, PassGate, Program, Reduce, Release, Send
from zbpp.schedule.timetable import Action


def with_gate(program: Program, gate: Gate) -> Program:
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

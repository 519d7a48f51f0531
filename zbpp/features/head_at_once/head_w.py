"""Inserts the W of a language model's head behind its B; the W of the stage's other weights keeps its place.

... 3B5  HeadW 3W5  Send g(2,5) ... 3W5
"""

from __future__ import annotations

from zbpp.schedule.program import Instruction, PartOfW, Program
from zbpp.schedule.timetable import Action, Op


class HeadW(PartOfW):
    """The W of a language model's head: the tasks that hold large gradients."""


def with_head_w(program: Program, stage: int) -> Program:
    """A program with a HeadW behind each B of this stage. A BW is left alone: its W follows B at once."""
    found: list[Instruction] = []
    for each in program.instructions:
        found.append(each)
        if isinstance(each, Action) and each.op == Op.B and each.stage == stage:
            found.append(HeadW(stage, each.microbatch))
    return program._replace(instructions=tuple(found))

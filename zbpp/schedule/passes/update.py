"""Updates inside a step: each stage is updated where its gradients are final.

without reductions    ... 2W7  Reduce 2  Update 2  1W6 ...
with them             ... 2W7  Reduce 2  1W6 ...  | Reduced 2  Update 2  Reduced 1  Update 1
accumulation          ... 2W6  Accumulate 2W6  2W7  Reduce 2  Update 2  1W6  Accumulate 1W6 ...
"""

from __future__ import annotations

from typing import TypeGuard

from zbpp.schedule.program import Accumulate, Instruction, Program, Reduce, Reduced, Update
from zbpp.schedule.timetable import Action, Op


def with_updates(program: Program) -> Program:
    """A program with one Update per stage: behind its Reduced, else behind its Reduce."""
    reduced = {each.stage for each in program.instructions if isinstance(each, Reduced)}
    found: list[Instruction] = []
    for each in program.instructions:
        found.append(each)
        if isinstance(each, Reduced) or (isinstance(each, Reduce) and each.stage not in reduced):
            found.append(Update(each.stage))
    return program._replace(instructions=tuple(found))


def with_accumulation(program: Program) -> Program:
    """A program with an Accumulate behind each W and BW of a stage but its last, and one Update per stage."""
    last = {each.stage: each for each in program.instructions if _completes(each)}
    found: list[Instruction] = []
    for each in program.instructions:
        found.append(each)
        if _completes(each) and each != last[each.stage]:
            found.append(Accumulate(each.stage, each.microbatch))
    return with_updates(program._replace(instructions=tuple(found)))


def _completes(instruction: Instruction) -> TypeGuard[Action]:
    """Whether the gradients of a microbatch are complete behind it."""
    return isinstance(instruction, Action) and instruction.op in (Op.W, Op.BW)

"""Updates inside a step: each stage is updated where its gradients are final.

without reductions    ... 2W7  Reduce 2  Update 2  1W6 ...
with them             ... 2W7  Reduce 2  1W6 ...  | Reduced 2  Update 2  Reduced 1  Update 1
accumulation          ... 2W6  Accumulate 2W6  2W7  Reduce 2  Update 2  1W6  Accumulate 1W6 ...
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

from zbpp.schedule.interpret.memory import RankBytes
from zbpp.schedule.program import Instruction, Program, Reduce, Reduced
from zbpp.schedule.timetable import Action, Op


class Accumulate(NamedTuple):
    """Give a microbatch's gradients to the states of the optimizer, and drop them."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"Accumulate {self.stage}W{self.microbatch}"

    def change_bytes(self, memory: RankBytes) -> None:
        """The stage drops its gradients."""
        memory.release(self.stage)


class Update(NamedTuple):
    """Update a stage's weights: their gradients are final."""

    stage: int

    def __str__(self) -> str:
        return f"Update {self.stage}"

    def change_bytes(self, memory: RankBytes) -> None:
        """The stage drops its gradients; those that are reduced go at the end of the step."""
        if memory.stages[self.stage].reduced is None:
            memory.release(self.stage)


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

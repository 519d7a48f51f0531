"""Reductions of a step: behind everything else, wait for the stages, then reduce what they share.

    ... 1F0 Zero copies 1B0 ... 1W7 Reduce 1 ... 0W7 Reduce 0 | Reduced 1  Reduced 0  Reduce shared parameters

`lower` has put the Reduce of each stage behind the stage's last W.
"""

from __future__ import annotations

from collections.abc import Iterable

from zbpp.schedule.program import Program, Reduced, ReduceShared, ZeroCopies
from zbpp.schedule.timetable import Action, Op


def with_reductions(program: Program, stages: Iterable[int]) -> Program:
    """A program that waits for the reductions of these stages; an evaluation's program stays as it is."""
    instructions = program.instructions
    backwards = (at for at, each in enumerate(instructions) if isinstance(each, Action) and each.op != Op.F)
    first = next(backwards, None)
    if first is None:
        return program
    ends = (*map(Reduced, stages), ReduceShared())
    return program._replace(instructions=(*instructions[:first], ZeroCopies(), *instructions[first:], *ends))

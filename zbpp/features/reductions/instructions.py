"""Inserts the end of a step's reductions: wait for that of each stage, then reduce the shared parameters.

    ... 1F0 Zero copies 1B0 ... 1W7 Reduce 1 ... 0W7 Reduce 0 | Reduced 1  Reduced 0  Reduce shared parameters

`lower` has put a stage's Reduce, which starts its reduction, behind the stage's last W. Before the first B,
Zero copies sets the gradients of tied parameters' copies to zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zbpp.schedule.program import Program, Reduced
from zbpp.schedule.timetable import Action, Op


class ZeroCopies(NamedTuple):
    """Set the gradients of tied copies to zero: their owner's holds the sum of earlier steps."""

    def __str__(self) -> str:
        return "Zero copies"


class ReduceShared(NamedTuple):
    """Reduce the gradients of parameters that several stages or ranks share, and of the loss."""

    def __str__(self) -> str:
        return "Reduce shared parameters"


def with_reductions(program: Program, stages: Iterable[int]) -> Program:
    """A program that ends the reductions of these stages; a program without backward stays as it is."""
    instructions = program.instructions
    backwards = (at for at, each in enumerate(instructions) if isinstance(each, Action) and each.op != Op.F)
    first = next(backwards, None)
    if first is None:
        return program
    ends = (*map(Reduced, stages), ReduceShared())
    return program._replace(instructions=(*instructions[:first], ZeroCopies(), *instructions[first:], *ends))

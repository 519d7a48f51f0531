"""Inserts the copies of an activation offload: which values leave the device, and when.

A ROUND TRIP copies saved(s,m), what F keeps for B, to host memory after F, and back before B. A round trip is
four instructions. A rank has one copy stream; c is the time of one copy on it:

    F ... Offload ... Drop .................... Fetch ... Await B
          [---- c ----]                         [- c -]
          on the device       away              on the device again

Offload and Fetch start a copy. Drop and Await wait for the end of a copy; Drop then frees the device memory.

    ... 0F3  Drop saved(0,1)  Offload saved(0,3)  Recv g(0,0) from 1  Await saved(0,0)  0B0 ...

offload_choice.py chooses by costs which values leave, and places the instructions; interpret/timing.py says
how long the copies take.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from zbpp.schedule.program import Instruction, Program, Recv, Transport
from zbpp.schedule.timetable import Action


class Placed(NamedTuple):
    """An instruction and its place between two actions of its rank's row.

    before: the position of the action after the instruction. at_once: whether the rank executes the
    instruction directly after the previous action, or directly before the action at `before`. Between these
    two places the rank may wait for a message.
    """

    before: int
    at_once: bool
    instruction: Transport


RankOffload = tuple[Placed, ...]
"""The instructions of one rank's round trips, in the order in which the rank executes them."""


def with_copies(program: Program, placed: RankOffload) -> Program:
    """A program with the copies of its rank."""
    copies: dict[tuple[int, bool], list[Instruction]] = defaultdict(list)
    positions = program.positions()
    for copy in placed:
        copies[positions[copy.before], copy.at_once].append(copy.instruction)
    found, receives, position = list[Instruction](), list[Instruction](), 0
    for each in (*program.instructions, None):
        if isinstance(each, Action) or each is None:
            found += [*copies[position, True], *receives, *copies[position, False]]
            found += [] if each is None else [each]
            receives, position = [], position + 1
        elif receives or isinstance(each, Recv):  # what follows a Recv may need it
            receives.append(each)
        else:
            found.append(each)
    return program._replace(instructions=tuple(found))

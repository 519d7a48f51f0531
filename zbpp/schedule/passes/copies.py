"""Inserts the copies of an activation offload, at the places that schedule/offload.py's `Placed` gives.

... 0F3  Drop saved(0,1)  Offload saved(0,3)  Recv g(0,0) from 1  Await saved(0,0)  0B0 ...
"""

from __future__ import annotations

from collections import defaultdict

from zbpp.schedule.offload import RankOffload
from zbpp.schedule.program import Instruction, Program, Recv
from zbpp.schedule.timetable import Action


def with_copies(program: Program, placed: RankOffload) -> Program:
    """A program with the copies of its rank."""
    copies: dict[tuple[int, bool], list[Instruction]] = defaultdict(list)
    positions = program.positions()
    for copy in placed:
        copies[positions[copy.before], copy.at_once].append(copy.instruction)
    found, receives, position = list[Instruction](), list[Instruction](), 0
    for each in (*program.instructions, None):
        if isinstance(each, Recv):
            receives.append(each)
        elif isinstance(each, Action) or each is None:
            found += [*copies[position, True], *receives, *copies[position, False]]
            found += [] if each is None else [each]
            receives, position = [], position + 1
        else:
            found.append(each)
    return program._replace(instructions=tuple(found))

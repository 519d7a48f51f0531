"""Updates inside a step: each stage is updated where its gradients are final.

without reductions    ... 2W7  Reduce 2  Update 2  1W6 ...
with them             ... 2W7  Reduce 2  1W6 ...  | Reduced 2  Update 2  Reduced 1  Update 1
"""

from __future__ import annotations

from zbpp.schedule.lower import Program, Reduce, Reduced
from zbpp.schedule.program import Update


def with_updates(program: Program) -> Program:
    """A program with one Update per stage: behind its Reduced, else behind its Reduce."""
    reduced = {each.stage for each in program.instructions if isinstance(each, Reduced)}
    found = []
    for each in program.instructions:
        found.append(each)
        if isinstance(each, Reduced) or (isinstance(each, Reduce) and each.stage not in reduced):
            found.append(Update(each.stage))
    return program._replace(instructions=tuple(found))

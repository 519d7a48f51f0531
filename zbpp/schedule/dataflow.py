"""What an action consumes and produces: the ONLY statement of dependencies.

| action  | consumes          | produces                                     |
|---------|-------------------|----------------------------------------------|
| F(s,m)  | x(s,m)            | x(s+1,m), on the last stage g(s,m); saved(s,m) |
| B(s,m)  | g(s,m), saved(s,m)| g(s-1,m); deferred(s,m)                      |
| W(s,m)  | deferred(s,m)     | done(s,m)                                    |
| BW(s,m) | g(s,m), saved(s,m)| g(s-1,m); done(s,m)                          |

Stage 0 consumes no x (it reads the batch) and produces no g. A value is always consumed
on the stage that it names, so its producer must send it just when another rank owns that
stage. Simulator, search and lowering ask here; the executor's mailbox has the same keys.
"""

from __future__ import annotations

from typing import NamedTuple

from zbpp.schedule.timetable import Action, Op


class Value(NamedTuple):
    """Something that one action hands to another, named by where it is consumed; as text `x(3,0)`."""

    name: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.name}({self.stage},{self.microbatch})"


VALUE_NAMES = ("x", "g", "saved", "deferred", "done")

# op -> (name, offset from the action's stage to the value's)
_CONSUMES = {
    Op.F: (("x", 0),),
    Op.B: (("g", 0), ("saved", 0)),
    Op.W: (("deferred", 0),),
    Op.BW: (("g", 0), ("saved", 0)),
}
_PRODUCES = {
    Op.F: (("x", 1), ("saved", 0)),
    Op.B: (("g", -1), ("deferred", 0)),
    Op.W: (("done", 0),),
    Op.BW: (("g", -1), ("done", 0)),
}


def consumes(action: Action) -> tuple[Value, ...]:
    """The values that must have arrived before `action` can start."""
    values = (Value(name, action.stage + offset, action.microbatch) for name, offset in _CONSUMES[action.op])
    return tuple(value for value in values if value[:2] != ("x", 0))


def produces(action: Action, num_stages: int) -> tuple[Value, ...]:
    """The values that exist once `action` has ended."""
    values = (Value(name, action.stage + offset, action.microbatch) for name, offset in _PRODUCES[action.op])
    return tuple(_at_the_ends(value, num_stages) for value in values if value.stage >= 0)


def _at_the_ends(value: Value, num_stages: int) -> Value:
    # The loss is computed at the end of the last F, so the backward starts on the same stage.
    past_the_end = value.stage == num_stages
    return Value("g", value.stage - 1, value.microbatch) if past_the_end else value

"""What an action consumes and produces: the ONLY statement of dependencies.

| action  | consumes           | produces                                                 |
|---------|--------------------|----------------------------------------------------------|
| F(s,m)  | x(s,m)             | x(s+1,m) (on the last stage g(s,m) instead); saved(s,m)  |
| B(s,m)  | g(s,m), saved(s,m) | g(s-1,m); deferred(s,m)                                  |
| W(s,m)  | deferred(s,m)      | done(s,m)                                                |
| BW(s,m) | g(s,m), saved(s,m) | g(s-1,m); done(s,m)                                      |

x(s,m) is the input of stage s, g(s,m) the gradient of its output; saved is what F keeps for its backward,
deferred what B keeps for W. No action consumes `done`. Stage 0 consumes no x (it reads the batch), and its B
and BW produce no g. A value is consumed on the stage that it names: x(1,5) by an action on stage 1, for
microbatch 5. So a value has to be sent if, and only if, the stage that it names is on another rank than its
producer. Code that needs a dependency asks here, or asks `dataflow_arrays`, which derives its arrays from
this table. The executor keeps x and g in numbered slots; a StageWorker keeps saved and deferred.

With slices the table holds for each unit u = (m, k), slice k of microbatch m, in place of m. The slices of a
microbatch then also pass keys and values (kv) and their gradients (dkv) on, within their stage:

| action            | consumes too   | produces too |
|-------------------|----------------|--------------|
| F(s,m,k)          | kv(s,m,k-1)    | kv(s,m,k)    |
| B or BW (s,m,k)   | dkv(s,m,k+1)   | dkv(s,m,k)   |

`consumes` and `produces` leave kv and dkv out, for `saved` and the order of a stage (`check_row` in check.py)
imply them: F's ascend in slice, so F(k-1) precedes F(k); B's descend, so B(k+1) precedes B(k).
"""

from __future__ import annotations

from typing import NamedTuple

from zbpp.schedule.timetable import Action, Op


class Value(NamedTuple):
    """What an action makes, for another one (but `done`): `x(3,0)` is consumed on stage 3, microbatch 0.

    microbatch: the number of the unit, as in an Action; of slice 2 of microbatch 0 the text is `x(3,0.2)`.
    """

    name: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.name}({self.stage},{self.microbatch})"


VALUE_NAMES = ("x", "g", "saved", "deferred", "done")

# For each op its values: (name, stage of the value minus stage of the action).
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
    """The values that must be there before `action` can start."""
    stage, op, unit = action
    values = [Value(name, stage + offset, unit) for name, offset in _CONSUMES[op]]
    return tuple([value for value in values if value[:2] != ("x", 0)])


def produces(action: Action, num_stages: int) -> tuple[Value, ...]:
    """The values that `action` makes."""
    stage, op, unit = action
    values = [Value(name, stage + offset, unit) for name, offset in _PRODUCES[op]]
    return tuple([_at_the_ends(value, num_stages) for value in values if value.stage >= 0])


def _at_the_ends(value: Value, num_stages: int) -> Value:
    # The last F computes the loss instead of an x for the next stage, and its backward starts there.
    if value.stage == num_stages:
        return Value("g", num_stages - 1, value.microbatch)
    return value

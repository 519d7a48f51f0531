"""The data-flow table over arrays: each value is a number.

The value with the same name and stage, for the next unit, has the next number; without slices a unit is a
microbatch.

A timetable of 512 ranks and 4096 microbatches has 12 million actions: asking `consumes` and
`produces` for each would take minutes. They are asked once per stage and op, for microbatch 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from zbpp.schedule.dataflow import VALUE_NAMES, Value, consumes, produces
from zbpp.schedule.timetable import Action, Op, Row, Timetable
from zbpp.schedule.units import Unit

Numbers = npt.NDArray[np.int64]


class Values:
    """The values of all actions on `num_stages` stages for `num_units` units. They never change.

    consumed[kind], produced[kind]: the numbers of an action's values at unit 0; add the unit.
    """

    def __init__(self, num_stages: int, num_units: int, num_slices: int = 1) -> None:
        self._shape, self._num_slices = (len(VALUE_NAMES), num_stages, num_units), num_slices
        actions = [Action(stage, op, 0) for stage in range(num_stages) for op in Op]
        self.consumed = tuple([self._numbers(consumes(action)) for action in actions])
        self.produced = tuple([self._numbers(produces(action, num_stages)) for action in actions])
        self._consumed, self._produced = _padded(self.consumed), _padded(self.produced)

    @staticmethod
    def of(timetable: Timetable) -> Values:
        """The values of a timetable's actions: one object for timetables of the same size."""
        return _values_of_size(timetable.num_stages, timetable.num_units, timetable.num_slices)

    def __len__(self) -> int:
        return math.prod(self._shape)

    def number(self, value: Value) -> int:
        _, num_stages, num_units = self._shape
        name_index = VALUE_NAMES.index(value.name)
        return (name_index * num_stages + value.stage) * num_units + value.microbatch

    def _numbers(self, values: Sequence[Value]) -> tuple[int, ...]:
        return tuple([self.number(value) for value in values])

    def stages(self, numbers: Numbers) -> Numbers:
        """The stage on which each value is consumed."""
        _, num_stages, num_units = self._shape
        return numbers // num_units % num_stages

    def named(self, numbers: Numbers) -> list[Value]:
        """The values with these numbers."""
        names, stages, units = (each.tolist() for each in np.unravel_index(numbers, self._shape))
        if self._num_slices > 1:
            units = [Unit(unit, self._num_slices) for unit in units]
        columns = zip(names, stages, units, strict=True)
        return [Value(VALUE_NAMES[name], *place) for name, *place in columns]

    def consumed_in(self, row: Row) -> tuple[Numbers, Numbers]:
        """(position in the row, number) of each value that the row's actions consume, in the row's order."""
        return _in_row(row, self._consumed)

    def produced_in(self, row: Row) -> tuple[Numbers, Numbers]:
        """(position in the row, number) of each value that the row's actions produce, in the row's order."""
        return _in_row(row, self._produced)


@lru_cache(maxsize=8)
def _values_of_size(num_stages: int, num_units: int, num_slices: int) -> Values:
    return Values(num_stages, num_units, num_slices)


# A kind is a stage and an op as one number: F, B, W, BW of stage 0 are 0 to 3, those of stage 1 are 4 to 7.
_NUM_OPS = len(Op)  # a constant, since len(Op) takes longer than all else in the four functions below


def kinds_of(row: Row) -> npt.NDArray[np.int32]:
    """The kind of each action of a row."""
    return row.stages * _NUM_OPS + row.ops


def kind_of(stage: int, op: int) -> int:
    return stage * _NUM_OPS + op


def stage_of(kind: int) -> int:
    return kind // _NUM_OPS


def op_of(kind: int) -> int:
    return kind % _NUM_OPS


def producers(num_stages: int) -> list[list[tuple[int, ...]]]:
    """What each kind waits for: a tuple per value that it consumes, with the kinds that produce the value.

    Producer and consumer have the same unit. A value with two producers (B or BW) is made by
    the one that the plan contains. With two stages, F of stage 1 waits for F of stage 0; B of stage 0
    waits for B or BW of stage 1 and for F of stage 0.
    """
    actions = [Action(stage, op, 0) for stage in range(num_stages) for op in Op]
    made_by: dict[Value, tuple[int, ...]] = {}
    for kind, action in enumerate(actions):
        for value in produces(action, num_stages):
            made_by[value] = (*made_by.get(value, ()), kind)
    return [[made_by[value] for value in consumes(action)] for action in actions]


def complete_stages(row: Row) -> dict[int, int]:
    """{stage: position of its last W or BW in the row}, ascending by position; {} for a row of F's alone.

    There the stage's gradients are complete.
    """
    complete = np.flatnonzero((row.ops == Op.W) | (row.ops == Op.BW))
    _, from_the_end = np.unique(row.stages[complete][::-1], return_index=True)
    last = np.sort(complete[::-1][from_the_end])
    return dict(zip(row.stages[last].tolist(), last.tolist(), strict=True))


def changes_of_past(ops: Any, slices: Any, num_slices: int) -> tuple[Any, Any]:
    """(keys and values, sums of their gradients): 1 where an action makes those of a microbatch, -1 where it
    is the last one to need them, else 0.

    By dataflow.py's kv and dkv: a microbatch's keys and values are there from F of its first slice until B of
    its first slice, their gradients' sums from B of its last slice until then. ops, slices: of one action, or
    arrays of several.
    """
    is_b = (ops == Op.B) | (ops == Op.BW)
    ends = is_b & (slices == 0)
    begins, grads_begin = (ops == Op.F) & (slices == 0), is_b & (slices == num_slices - 1)
    return 1 * begins - 1 * ends, 1 * grads_begin - 1 * ends


def _padded(lists: Sequence[Sequence[int]]) -> Numbers:
    """table[kind, i]: the i-th number of lists[kind]; -1 past the end of the list."""
    longest = max(map(len, lists))
    return np.array([[*each, *[-1] * (longest - len(each))] for each in lists], dtype=np.int64)


def _in_row(row: Row, table: Numbers) -> tuple[Numbers, Numbers]:
    first = table[kinds_of(row)]
    positions, places = np.nonzero(first >= 0)
    return positions, first[positions, places] + row.microbatches[positions]

"""Whether a timetable has all of its actions, each once and in order: what can be said without running it."""

from __future__ import annotations

import numpy as np

from zbpp.schedule.timetable import Integers, Op, PlanError, Row, Timetable, units_in_order
from zbpp.schedule.units import unit_of

# Groups of ops: a stage has one action of each group per unit, in order. The arrays say by op's number
# whether the op is in the group.
_ORDERED = tuple((ops, np.array([op in ops for op in Op])) for ops in ((Op.F,), (Op.B, Op.BW), (Op.W, Op.BW)))


def check_actions(timetable: Timetable) -> None:
    """Raises PlanError if an action repeats or is missing, or for an order that `check_row` refuses."""
    for row in timetable.rows:
        check_row(row, timetable.num_units)
    _check_backwards(timetable)


def check_row(row: Row, num_units: int) -> None:
    """A stage has per unit one F, one B or BW, one W or BW, or F alone, and each kind is in order.

    F's ascend in units; B's and BW's, and W's and BW's, ascend in microbatch and descend in slice.
    """
    by_stage = np.argsort(row.stages, kind="stable")
    for positions in np.split(by_stage, np.flatnonzero(np.diff(row.stages[by_stage])) + 1):
        own = row.select(positions)
        stage = int(own.stages[0])
        has_backward = (own.ops != Op.F).any()
        for ops, is_one in _ORDERED if has_backward else _ORDERED[:1]:
            _check_order(stage, ops, own.microbatches[is_one[own.ops]], row.num_slices, num_units)


def _check_order(stage: int, ops: tuple[Op, ...], units: Integers, num_slices: int, expected: int) -> None:
    """units: of the stage's actions with one of these ops, in the row's order."""
    places = units_in_order(ops[0], units, num_slices)
    # No array here is as long as `expected`: a short text can name microbatch 2147483647.
    if len(units) == expected and np.array_equal(places, np.arange(len(units))):
        return
    names, per = " or ".join(map(str, ops)), "microbatch" if num_slices == 1 else "slice"

    def text(unit: int) -> str:
        return f"{stage}{ops[0]}{unit_of(int(unit), num_slices)}"

    found, counts = np.unique(units, return_counts=True)
    repeated = found[counts > 1]
    if len(repeated):
        raise PlanError(f"{text(repeated[0])} repeats: a stage has one {names} per {per}")
    if len(found) < expected:
        missing = next((i for i, unit in enumerate(found.tolist()) if i != unit), len(found))
        raise PlanError(f"{text(missing)} is missing: a stage has one {names} per {per}")
    early = np.flatnonzero(np.diff(places) < 0)
    if len(early):
        one, other = (text(unit) for unit in units[early[0] : early[0] + 2])
        raise PlanError(f"{other} comes after {one}: {names} of a stage must {_law(ops, num_slices)}")


def _law(ops: tuple[Op, ...], num_slices: int) -> str:
    """The order of a stage's actions, and the reason for it."""
    if num_slices == 1:
        return "ascend in microbatch, so that gradients are always summed in the same order"
    if ops == (Op.F,):
        return "ascend in microbatch and slice: a slice needs the keys and values of the slices before it"
    return (
        "ascend in microbatch and descend in slice: a slice needs the gradients of its keys and values that "
        "the slices behind it make"
    )


def _check_backwards(timetable: Timetable) -> None:
    """Either all stages have backwards, or none has."""
    with_backward: set[int] = set()
    for row in timetable.rows:
        with_backward |= set(np.unique(row.stages[row.ops != Op.F]).tolist())
    without = set(range(timetable.num_stages)) - with_backward
    if with_backward and without:
        raise PlanError(f"stage {min(without)} has no backward, but stage {min(with_backward)} has one")

"""Whether a timetable is complete: no action repeats or is missing, and microbatches ascend on each stage."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zbpp.schedule.timetable import Op, PlanError, Row, Timetable


def check_row(row: Row, num_microbatches: int) -> None:
    """A stage has per microbatch one F, one B or BW, one W or BW, or F alone; each kind ascends."""
    by_stage = np.argsort(row.stages, kind="stable")
    for positions in np.split(by_stage, np.flatnonzero(np.diff(row.stages[by_stage])) + 1):
        own = row.select(positions)
        stage = int(own.stages[0])
        if (own.ops == Op.F).all():
            checked: tuple[tuple[Op, ...], ...] = ((Op.F,),)
        else:
            checked = ((Op.F,), (Op.B, Op.BW), (Op.W, Op.BW))
        for ops in checked:
            _check_ascending(stage, ops, own.microbatches[np.isin(own.ops, ops)], num_microbatches)


def _check_ascending(
    stage: int, ops: tuple[Op, ...], microbatches: npt.NDArray[np.int32], expected: int
) -> None:
    name, names = str(ops[0]), " or ".join(map(str, ops))
    found, counts = np.unique(microbatches, return_counts=True)
    repeated = found[counts > 1]
    if len(repeated):
        raise PlanError(f"{stage}{name}{repeated[0]} repeats: a stage has one {names} per microbatch")
    # No array here is as long as `expected`: a short text can name microbatch 2147483647.
    if len(found) < expected:
        missing = next((i for i, microbatch in enumerate(found.tolist()) if i != microbatch), len(found))
        raise PlanError(f"{stage}{name}{missing} is missing: a stage has one {names} per microbatch")
    if (np.diff(microbatches) > 0).all():
        return
    late = int(np.flatnonzero(np.diff(microbatches) < 0)[0])
    raise PlanError(
        f"{stage}{name}{microbatches[late + 1]} comes after {stage}{name}{microbatches[late]}: "
        f"{names} of a stage must ascend in microbatch, so that gradients are always summed in the same order"
    )


def check_backwards(timetable: Timetable) -> None:
    """Either all stages have backwards, or none has."""
    with_backward: set[int] = set()
    for row in timetable.rows:
        with_backward |= set(np.unique(row.stages[row.ops != Op.F]).tolist())
    without = set(range(timetable.num_stages)) - with_backward
    if with_backward and without:
        raise PlanError(f"stage {min(without)} has no backward, but stage {min(with_backward)} has one")

"""When the gradients of a stage are complete, so that its replicas can sum them."""

from __future__ import annotations

import numpy as np

from zbpp.schedule.timetable import Op, Row


def complete_stages(row: Row) -> dict[int, int]:
    """Stage -> the position of its last W or BW in the row, ascending by position; empty for F's alone."""
    complete = np.flatnonzero((row.ops == Op.W) | (row.ops == Op.BW))
    _, from_the_end = np.unique(row.stages[complete][::-1], return_index=True)
    last = np.sort(complete[::-1][from_the_end])
    return dict(zip(row.stages[last].tolist(), last.tolist(), strict=True))

"""When a stage's gradients are complete, and when its replicas sum them: predicted or measured.

A rank reduces one stage at a time, in the order in which its stages are complete, beside its computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.schedule.timetable import Op, Row


class Reduction(NamedTuple):
    """The sum of a stage's gradients over its replicas, on the rank that owns the stage. Times in ms.

    start: when the gradients are complete and the rank's earlier reductions have ended.
    """

    stage: int
    rank: int
    start: float
    end: float


def complete_stages(row: Row) -> dict[int, int]:
    """{stage: position of its last W or BW in the row}, ascending by position; {} for a row of F's alone."""
    complete = np.flatnonzero((row.ops == Op.W) | (row.ops == Op.BW))
    _, from_the_end = np.unique(row.stages[complete][::-1], return_index=True)
    last = np.sort(complete[::-1][from_the_end])
    return dict(zip(row.stages[last].tolist(), last.tolist(), strict=True))


def predicted_reductions(
    rank: int, row: Row, ends: npt.NDArray[np.float64], reduce: Sequence[float]
) -> Iterator[Reduction]:
    """One rank's reductions in order, without those of 0 ms.

    ends: when each action of the row ends; reduce: how long each stage's reduction takes. In ms.
    """
    free = 0.0
    for stage, position in complete_stages(row).items():
        if reduce[stage] > 0:
            start = max(free, float(ends[position]))
            free = start + reduce[stage]
            yield Reduction(stage, rank, start, free)

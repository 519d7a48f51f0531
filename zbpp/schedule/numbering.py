"""Gives each op of an order its microbatch, so that the order becomes a row of actions.

On each stage the microbatches ascend, so the order of a rank's ops determines their microbatches. Counted
from 0, the k-th F of a stage is F of microbatch k; its k-th B or BW is the backward of microbatch k; its
k-th W or BW completes microbatch k. A BW counts twice, so it may come only once all earlier B's of its stage
have had their W.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from zbpp.schedule.timetable import Op, Row

StageOp = tuple[int, Op]

# The last entry that has an op decides its number: a BW is numbered among the backwards.
_COUNTED_TOGETHER = ((Op.F,), (Op.W, Op.BW), (Op.B, Op.BW))


def numbered(order: Iterable[StageOp]) -> Row:
    """Give each op its microbatch: the order (2, F), (2, F), (2, B) is the row 2F0 2F1 2B0."""
    flat = np.fromiter(itertools.chain.from_iterable(order), dtype=np.int32)
    stages, ops = np.ascontiguousarray(flat.reshape(-1, 2).T)
    microbatches = np.empty_like(ops)
    counted_together = [np.isin(ops, counted_ops) for counted_ops in _COUNTED_TOGETHER]
    for stage in np.unique(stages):
        of_stage = stages == stage
        for each in counted_together:
            counted = np.flatnonzero(of_stage & each)
            microbatches[counted] = np.arange(len(counted))
    return Row(stages, ops, microbatches)

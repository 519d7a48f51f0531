"""Rows from words: where a stage's microbatches ascend, the order of the ops says everything.

A word is (stage, op): what comes next, without its microbatch. The k-th F of a stage is F of
microbatch k, its k-th B or BW that microbatch's backward, its k-th W or BW the end of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from zbpp.schedule.timetable import Op, Row

Word = tuple[int, Op]

_COUNTED_TOGETHER = ((Op.F,), (Op.W, Op.BW), (Op.B, Op.BW))


def numbered(words: Iterable[Word]) -> Row:
    """The row of these words, each with its microbatch: (2, F) (2, F) (2, B) is 2F0 2F1 2B0."""
    flat = np.fromiter(itertools.chain.from_iterable(words), dtype=np.int32)
    stages, ops = np.ascontiguousarray(flat.reshape(-1, 2).T)
    microbatches = np.empty_like(ops)
    for stage in np.unique(stages):
        for kinds in _COUNTED_TOGETHER:
            counted = np.flatnonzero((stages == stage) & np.isin(ops, kinds))
            microbatches[counted] = np.arange(len(counted))
    return Row(stages, ops, microbatches)

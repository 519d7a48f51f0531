"""Repeated patterns for a V: blocks of F0, F1, B1, B0 that never collide.

A microbatch goes down the V (F0), back up (F1), down (B1), up (B0); here 0 and 1 name a rank's first
and second stage. Cut time into slots, and let a microbatch begin every six slots (a rank has six
actions per microbatch). Each of the four legs takes a fixed number of slots from rank to rank, its
pace; three gaps lie between the legs. If on every rank the four start slots differ modulo six,
microbatches never collide, and two slots in six are left for W's. ZB-V, V-Half and V-Min
(arXiv:2405.15362) are such patterns. With smaller paces a microbatch is through sooner, so less is held.

The slots only give an order of F's and B's; the real durations decide which order is best.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from zbpp.planning.problem import Problem
from zbpp.schedule.dataflow_arrays import kind_of
from zbpp.schedule.timetable import Op

_PERIOD = 6
_MOST_PACE = 5

Slots = list[list[int]]  # per rank, the start slots of F0, F1, B1, B0 of microbatch 0


def blocks(num_ranks: int) -> Iterator[Slots]:
    """All patterns in which both legs down (F0, B1) or both legs up (F1, B0) have a pace of 1.

    The paces of the other two legs are 1 to 5.
    """
    lengths = range(1, _MOST_PACE + 1)
    pairs = itertools.product(lengths, lengths)
    choices = {paces for k, j in pairs for paces in ((1, k, 1, j), (k, 1, j, 1))}
    for paces in sorted(choices):
        for gaps in itertools.product(range(1, _PERIOD + 1), repeat=3):
            slots = _slots(num_ranks, paces, gaps)
            if all(len({slot % _PERIOD for slot in row}) == 4 for row in slots):
                yield slots


def _slots(num_ranks: int, paces: tuple[int, ...], gaps: tuple[int, ...]) -> Slots:
    last = num_ranks - 1
    begins = [0]  # of the legs, on rank 0 and on the last rank in turn
    for k, gap in zip(paces[:-1], gaps, strict=True):
        begins.append(begins[-1] + last * k + gap)
    down, up = range(num_ranks), range(last, -1, -1)  # how far a rank is from where the leg begins
    distances = zip(down, up, down, up, strict=True)
    return [
        [begin + k * distance for begin, k, distance in zip(begins, paces, row, strict=True)]
        for row in distances
    ]


def unrolled(slots: Slots, problem: Problem) -> list[list[int]]:
    """The pattern for all microbatches: per rank, the ids of F's and B's in the order of their slots."""
    number, last = problem.num_microbatches, problem.num_stages - 1
    orders = []
    for rank, row in enumerate(slots):
        second = last - rank
        kinds = (kind_of(rank, Op.F), kind_of(second, Op.F), kind_of(second, Op.B), kind_of(rank, Op.B))
        timed = [
            (slot + _PERIOD * k, kind * number + k)
            for slot, kind in zip(row, kinds, strict=True)
            for k in range(number)
        ]
        orders.append([action for _, action in sorted(timed)])
    return orders

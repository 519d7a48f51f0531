"""Repeated patterns for a V: every block of F0, F1, B1, B0 without collision, tried on the real costs.

A microbatch goes down the V (F0), back up (F1), down (B1), up (B0); here 0 and 1 name a rank's first
and second stage. Cut time into slots, begin a microbatch every six of them (six actions a rank and
microbatch), and let each leg take a fixed number of slots per hop. Such a pattern is given by the
four steps and the three gaps where the legs turn. If on every rank the four starts fall into
different slots modulo six, microbatches never collide, and W's have two slots in six to go to.
ZB-V, V-Half and V-Min (arXiv:2405.15362) are members of this family; the smaller the steps, the
sooner a microbatch is through, and the less is held.

The slots only order F's and B's; how long things really take is for the simulation to say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from zbpp.planning.problem import Problem
from zbpp.schedule.timetable import Op

_PERIOD = 6
_MOST_STEP = 5

Slots = list[list[int]]  # per rank, the start slots of F0, F1, B1, B0 of microbatch 0


def blocks(num_ranks: int) -> Iterator[Slots]:
    """All patterns with one kind of step of 1: down or up."""
    long = range(1, _MOST_STEP + 1)
    steps = {step for k, j in itertools.product(long, long) for step in ((1, k, 1, j), (k, 1, j, 1))}
    for step in sorted(steps):
        for gaps in itertools.product(range(1, _PERIOD + 1), repeat=3):
            slots = _slots(num_ranks, step, gaps)
            if all(len({slot % _PERIOD for slot in row}) == 4 for row in slots):
                yield slots


def _slots(num_ranks: int, step: tuple[int, ...], gaps: tuple[int, ...]) -> Slots:
    last = num_ranks - 1
    top = [0]  # where a leg begins: rank 0 or the last, in turn
    for k, gap in zip(step, gaps, strict=False):
        top.append(top[-1] + last * k + gap)
    return [
        [top[leg] + step[leg] * (rank if leg % 2 == 0 else last - rank) for leg in range(4)]
        for rank in range(num_ranks)
    ]


def unrolled(slots: Slots, problem: Problem) -> list[list[int]]:
    """The pattern for all microbatches: per rank, the ids of F's and B's in the order of their slots."""
    number, last = problem.num_microbatches, problem.num_stages - 1
    orders = []
    for rank, row in enumerate(slots):
        up = last - rank
        kinds = (rank * 4 + Op.F, up * 4 + Op.F, up * 4 + Op.B, rank * 4 + Op.B)
        timed = [
            (slot + _PERIOD * k, kind * number + k)
            for slot, kind in zip(row, kinds, strict=True)
            for k in range(number)
        ]
        orders.append([action for _, action in sorted(timed)])
    return orders

"""Interleaved 1F1B (arXiv:2104.04473) and interleaved zero bubble: v stages per rank, in a loop.

Rank r owns stages r, r + p, r + 2p, ..., so a unit passes every rank v times. Units go in rounds of n =
min(p, mS): a rank runs n of them on its first stage, the same n on its second stage, and so on. Backwards go
in the same rounds, from the rank's last stage to its first. After the warm-up a backward follows each
forward. A stage is a v-th of a rank's share of the model, and so the bubble is a v-th of the bubble with one
stage per rank: of 1F1B's, and for interleaved zero bubble of ZB-H1's.

Both orders are those of torch's ScheduleInterleaved1F1B and ScheduleInterleavedZeroBubble.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from zbpp.schedule.timetable import Integers, Op, PlanError, StageOp, Timetable, numbered, units_in_order


def interleaved_1f1b(
    num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2, num_slices: int = 1
) -> Timetable:
    """Rank r begins with (v - 1)n + 2(p - 1 - r) + a forwards, where n = min(p, mS); backwards are whole.

    a is 0 without slices and S - 1 if S divides n, see `_ahead`. The bubble is (p - 1)(F + B + W)/S. Rank r
    holds up to ((v + 1)p - 1 - 2r + a)/S stage-activations. Raises PlanError unless p divides mS, or mS < p
    (one short round).

    p=2, m=4:
        0F0 0F1 2F0 2F1 0F2 2BW0 0F3 2BW1 2F2 0BW0 2F3 0BW1 2BW2 2BW3 0BW2 0BW3
        1F0 1F1 3F0 3BW0 3F1 3BW1 1F2 1BW0 1F3 1BW1 3F2 3BW2 3F3 3BW3 1BW2 1BW3
    """
    rounds = _Rounds("interleaved_1f1b", num_ranks, num_microbatches, stages_per_rank, num_slices)
    return Timetable(
        numbered(rounds.order(rank, Op.BW, 2 * (num_ranks - 1 - rank)), num_slices)
        for rank in range(num_ranks)
    )


def interleaved_zb(
    num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2, num_slices: int = 1
) -> Timetable:
    """Rank r begins with (v - 1)n + p - 1 - r + a forwards, where n = min(p, mS).

    a is 0 without slices and S - 1 if S divides n, see `_ahead`. On rank r each W waits until r more B's have
    run. The bubble is (p - 1)(F + B - W)/S. A rank holds (vp + a)/S stage-activations. With one stage per
    rank the timetable is ZB-H1's. Raises PlanError unless p divides mS, or mS < p (one short round).

    p=2, m=4:
        0F0 0F1 2F0 2F1 2B0 2W0 0F2 2B1 2W1 0F3 0B0 0W0 2F2 0B1 0W1 2F3 2B2 2W2 2B3 2W3 0B2 0W2 0B3 0W3
        1F0 1F1 3F0 3B0 3F1 3B1 3W0 1F2 1B0 3W1 1F3 1B1 1W0 3F2 3B2 1W1 3F3 3B3 3W2 1B2 3W3 1B3 1W2 1W3
    """
    rounds = _Rounds("interleaved_zb", num_ranks, num_microbatches, stages_per_rank, num_slices)
    orders = [rounds.order(rank, Op.B, num_ranks - 1 - rank) for rank in range(num_ranks)]
    return Timetable(numbered(_with_w(order, delay=rank), num_slices) for rank, order in enumerate(orders))


class _Rounds:
    """The rounds in which units go."""

    def __init__(
        self, name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, num_slices: int
    ) -> None:
        _check_rounds(name, num_ranks, num_microbatches, num_slices)
        num_units = num_microbatches * num_slices
        self.num_stages, self.num_ranks = num_ranks * stages_per_rank, num_ranks
        self.size = min(num_ranks, num_units)
        self.number = num_units // self.size
        self.warm_up = (stages_per_rank - 1) * self.size
        self.warm_up += _ahead(num_units, num_slices, self.size, stages_per_rank)

    def order(self, rank: int, backward: Op, extra_warm_up: int) -> list[StageOp]:
        """The forwards and backwards of one rank."""
        stages = range(rank, self.num_stages, self.num_ranks)
        forwards: list[StageOp] = [(stage, Op.F) for stage in stages for _ in range(self.size)] * self.number
        backwards: list[StageOp] = [
            (stage, backward) for stage in reversed(stages) for _ in range(self.size)
        ] * self.number
        warm_up = self.warm_up + extra_warm_up
        order, rest = forwards[:warm_up], forwards[warm_up:]
        for pair in zip(rest, backwards[: len(rest)], strict=True):
            order += pair
        return order + backwards[len(rest) :]


def _ahead(num_units: int, num_slices: int, in_round: int, stages_per_rank: int) -> int:
    """How many forwards more than without slices a rank runs before its first backward.

    B number j of a stage is that of unit j with its slices counted from the end: up to S - 1 units behind
    unit j. The F's of the two units on this stage are as many forwards apart if one round has both. A round
    that lies between them has vn forwards.
    """

    def place(units: Integers) -> Integers:
        """The places of the units' F's on a rank's first stage, among the rank's forwards."""
        return units // in_round * in_round * stages_per_rank + units % in_round

    units = np.arange(num_units, dtype=np.int32)
    return int((place(units_in_order(Op.B, units, num_slices)) - place(units)).max())


def _with_w(order: Iterable[StageOp], delay: int) -> Iterator[StageOp]:
    """Insert each W `delay` B's after its own B; the W's that are left then come at the end."""
    waiting: deque[StageOp] = deque()
    for stage, op in order:
        yield stage, op
        if op == Op.B:
            waiting.append((stage, Op.W))
            if len(waiting) > delay:
                yield waiting.popleft()
    yield from waiting


def _check_rounds(name: str, num_ranks: int, num_microbatches: int, num_slices: int) -> None:
    num_units = num_microbatches * num_slices
    if num_units < num_ranks or num_units % num_ranks == 0:
        return
    step = num_ranks // math.gcd(num_ranks, num_slices)
    smaller = num_microbatches // step * step
    units = "microbatches" if num_slices == 1 else "slices"
    given = f"num_microbatches={num_microbatches}" + (
        "" if num_slices == 1 else f", num_slices={num_slices},"
    )
    raise PlanError(
        f"{name} runs rounds of num_ranks={num_ranks} {units}, and {given} is no whole number of them; "
        f"nearest that are: {smaller}, {smaller + step}"
    )

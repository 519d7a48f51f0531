"""ZB-H1 and ZB-H2, the handcrafted schedules of Zero Bubble (arXiv:2401.10241, section 2).

Both follow one pattern. A rank's row is a sequence of groups. Group k holds these three actions, as far as
their microbatches exist:

    F of microbatch k,   B of microbatch k - warm_up,   W of microbatch k - warm_up - delay

The warm-up is the number of groups before the first one that has a B. The delay moves W's from the steady
phase into the bubble at the end.
"""

import numpy as np

from zbpp.schedule.timetable import Op, PlanError, Row, Timetable


def zb_h1(num_ranks: int, num_microbatches: int) -> Timetable:
    """One stage per rank, the memory of 1F1B. On rank r the warm-up is p - 1 - r, the delay r.

    The bubble is (p - 1)(F + B - W): at F = B = W it is (p - 1)F, where 1F1B's is 3(p - 1)F.

    p=3, m=4:
        0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
        1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
        2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3
    """
    last = num_ranks - 1
    return Timetable(
        _row(rank, last - rank, delay=rank, num_microbatches=num_microbatches) for rank in range(num_ranks)
    )


def zb_h2(num_ranks: int, num_microbatches: int) -> Timetable:
    """One stage per rank, up to 2p - 1 activations. On rank r the warm-up is 2(p - 1 - r), the delay 2r.

    The bubble is (p - 1)(F + B - 2W): none at F = B = W. Raises PlanError below 2p - 1 microbatches.

    p=3, m=5:
        0F0 0F1 0F2 0F3 0F4 0B0 0W0 0B1 0W1 0B2 0W2 0B3 0W3 0B4 0W4
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1W0 1B3 1W1 1B4 1W2 1W3 1W4
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2W0 2W1 2W2 2W3 2W4
    """
    last = num_ranks - 1
    if num_microbatches < 2 * num_ranks - 1:
        raise PlanError(
            f"zb_h2 needs num_microbatches >= 2 * num_ranks - 1 = {2 * num_ranks - 1} to fill its warm-up, "
            f"got {num_microbatches}; zb_h1 runs with any number"
        )
    return Timetable(
        _row(rank, 2 * (last - rank), delay=2 * rank, num_microbatches=num_microbatches)
        for rank in range(num_ranks)
    )


def _row(stage: int, warm_up: int, *, delay: int, num_microbatches: int) -> Row:
    """All actions of a stage, sorted by their groups; within a group F, B, W."""
    microbatches = np.arange(num_microbatches, dtype=np.int32)
    first_group = {Op.F: 0, Op.B: warm_up, Op.W: warm_up + delay}
    groups = np.concatenate([first + microbatches for first in first_group.values()])
    ops = np.repeat(np.array(list(first_group), dtype=np.int32), num_microbatches)
    order = np.lexsort((ops, groups))
    return Row(np.full_like(ops, stage), ops[order], np.tile(microbatches, len(first_group))[order])

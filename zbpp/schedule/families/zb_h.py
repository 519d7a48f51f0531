"""ZB-H1 and ZB-H2, the handcrafted schedules of Zero Bubble (arXiv:2401.10241, section 2).

Both follow one pattern. A rank's row is a sequence of groups. Group k holds these three actions, as far as
they exist:

    the F number k,   the B number k - warm_up,   the W number k - warm_up - delay

The warm-up is the number of groups before the first one that has a B. The delay moves W's from the steady
phase into the bubble at the end.
"""

import numpy as np

from zbpp.schedule.timetable import Op, PlanError, Row, Timetable, units_in_order


def zb_h1(num_ranks: int, num_microbatches: int, *, num_slices: int = 1) -> Timetable:
    """One stage per rank, the memory of 1F1B. On rank r the warm-up is p - 1 - r + S - 1, the delay r.

    The bubble is (p - 1)(F + B - W)/S: at F = B = W it is (p - 1)F/S, where 1F1B's is 3(p - 1)F/S.

    p=3, m=4:
        0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
        1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
        2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3
    """
    last, num_units = num_ranks - 1 + num_slices - 1, num_microbatches * num_slices
    return Timetable(_row(rank, last - rank, rank, num_units, num_slices) for rank in range(num_ranks))


def zb_h2(num_ranks: int, num_microbatches: int, *, num_slices: int = 1) -> Timetable:
    """One stage per rank. On rank r the warm-up is 2(p - 1 - r) + S - 1, the delay 2r.

    A rank holds up to (2p - 1 + S - 1)/S activations. The bubble is (p - 1)(F + B - 2W)/S: none at F = B = W.
    Raises PlanError unless there are as many units as the first rank holds.

    p=3, m=5:
        0F0 0F1 0F2 0F3 0F4 0B0 0W0 0B1 0W1 0B2 0W2 0B3 0W3 0B4 0W4
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1W0 1B3 1W1 1B4 1W2 1W3 1W4
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2W0 2W1 2W2 2W3 2W4
    """
    last, num_units = 2 * (num_ranks - 1) + num_slices - 1, num_microbatches * num_slices
    least = -(-(last + 1) // num_slices)
    if num_microbatches < least:
        formula = "2 * num_ranks - 1" if num_slices == 1 else "2 * (num_ranks - 1) / num_slices + 1"
        raise PlanError(
            f"zb_h2 needs num_microbatches >= {formula} = {least} to fill its warm-up, "
            f"got {num_microbatches}; zb_h1 runs with any number"
        )
    return Timetable(
        _row(rank, last - 2 * rank, 2 * rank, num_units, num_slices) for rank in range(num_ranks)
    )


def _row(stage: int, warm_up: int, delay: int, num_units: int, num_slices: int) -> Row:
    """All actions of a stage, sorted by their groups; within a group F, B, W."""
    numbers = np.arange(num_units, dtype=np.int32)
    first_group = {Op.F: 0, Op.B: warm_up, Op.W: warm_up + delay}
    groups = np.concatenate([first + numbers for first in first_group.values()])
    ops = np.repeat(np.array(list(first_group), dtype=np.int32), num_units)
    order = np.lexsort((ops, groups))
    units = units_in_order(ops, np.tile(numbers, len(first_group)), num_slices)
    return Row(np.full_like(ops, stage), ops[order], units[order], num_slices)

"""GPipe (arXiv:1811.06965): all forwards, then all backwards."""

from zbpp.schedule.timetable import Action, Op, Timetable


def gpipe(num_ranks: int, num_microbatches: int) -> Timetable:
    """One stage per rank. Every rank holds the activations of all microbatches at once.

    The bubble is (p - 1)(F + B + W), as 1F1B's.

    p=3, m=4:
        0F0 0F1 0F2 0F3 0BW0 0BW1 0BW2 0BW3
        1F0 1F1 1F2 1F3 1BW0 1BW1 1BW2 1BW3
        2F0 2F1 2F2 2F3 2BW0 2BW1 2BW2 2BW3
    """
    return Timetable(
        [Action(stage, op, microbatch) for op in (Op.F, Op.BW) for microbatch in range(num_microbatches)]
        for stage in range(num_ranks)
    )

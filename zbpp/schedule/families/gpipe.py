"""GPipe (arXiv:1811.06965): all forwards, then all backwards."""

from zbpp.schedule.timetable import Op, Timetable, numbered


def gpipe(num_ranks: int, num_microbatches: int, *, num_slices: int = 1) -> Timetable:
    """One stage per rank. Every rank holds the activations of all microbatches at once.

    The bubble is (p - 1)(F + B + W)/S, as 1F1B's.

    p=3, m=4:
        0F0 0F1 0F2 0F3 0BW0 0BW1 0BW2 0BW3
        1F0 1F1 1F2 1F3 1BW0 1BW1 1BW2 1BW3
        2F0 2F1 2F2 2F3 2BW0 2BW1 2BW2 2BW3
    """
    num_units = num_microbatches * num_slices
    return Timetable(
        numbered([(stage, Op.F)] * num_units + [(stage, Op.BW)] * num_units, num_slices)
        for stage in range(num_ranks)
    )

"""1F1B, PipeDream-Flush (arXiv:2006.09503): after a warm-up a rank runs F and BW in turns."""

from zbpp.schedule.timetable import Op, StageOp, Timetable, numbered


def one_f_one_b(num_ranks: int, num_microbatches: int, *, num_slices: int = 1) -> Timetable:
    """One stage per rank. Rank r runs min(p - 1 - r + S - 1, mS) forwards, then alternates F and BW.

    Rank r holds up to (p - r + S - 1)/S activations. The bubble is (p - 1)(F + B + W)/S.

    p=3, m=4:
        0F0 0F1 0F2 0BW0 0F3 0BW1 0BW2 0BW3
        1F0 1F1 1BW0 1F2 1BW1 1F3 1BW2 1BW3
        2F0 2BW0 2F1 2BW1 2F2 2BW2 2F3 2BW3
    """
    num_units, last = num_microbatches * num_slices, num_ranks - 1
    return Timetable(
        numbered(_order(stage, min(last - stage + num_slices - 1, num_units), num_units), num_slices)
        for stage in range(num_ranks)
    )


def _order(stage: int, warm_up: int, num_units: int) -> list[StageOp]:
    """`warm_up` forwards; then F and BW in turns until no F is left; then the last `warm_up` backwards."""
    f, bw = (stage, Op.F), (stage, Op.BW)
    return [f] * warm_up + [f, bw] * (num_units - warm_up) + [bw] * warm_up

"""1F1B, PipeDream-Flush (arXiv:2006.09503): after a warm-up a rank runs F and BW in turns."""

from zbpp.schedule.timetable import Action, Op, Timetable


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Timetable:
    """One stage per rank. Rank r runs min(p - 1 - r, m) forwards, then alternates F and BW.

    Rank r holds up to p - r activations. The bubble is (p - 1)(F + B + W).

    p=3, m=4:
        0F0 0F1 0F2 0BW0 0F3 0BW1 0BW2 0BW3
        1F0 1F1 1BW0 1F2 1BW1 1F3 1BW2 1BW3
        2F0 2BW0 2F1 2BW1 2F2 2BW2 2F3 2BW3
    """
    return Timetable(
        _row(stage, min(num_ranks - 1 - stage, num_microbatches), num_microbatches)
        for stage in range(num_ranks)
    )


def _row(stage: int, warm_up: int, num_microbatches: int) -> list[Action]:
    """`warm_up` forwards; then F and BW in turns until no F is left; then the last `warm_up` backwards."""
    forwards = [Action(stage, Op.F, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(stage, Op.BW, microbatch) for microbatch in range(num_microbatches)]
    pairs = zip(forwards[warm_up:], backwards[: num_microbatches - warm_up], strict=True)
    steady = [action for pair in pairs for action in pair]
    return forwards[:warm_up] + steady + backwards[num_microbatches - warm_up :]

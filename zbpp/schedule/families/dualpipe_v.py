"""DualPipeV, DeepSeek's DualPipe cut in half (github.com/deepseek-ai/DualPipe, arXiv:2412.19437).

Each rank owns two stages, and the stages lie in a V, as in ZB-V. DualPipe runs an F and a backward at the
same time on one rank, so that one computes while the other waits for an all-to-all. Here the two run one
after the other. Run so, DualPipeV is slower than ZB-V at F = B = W and needs more memory: it serves to
compare with torch. The order is that of torch's ScheduleDualPipeV, with the F of each overlapped pair first.
"""

from __future__ import annotations

from zbpp.schedule.timetable import Op, PlanError, StageOp, Timetable, numbered


def dualpipe_v(num_ranks: int, num_microbatches: int, *, num_slices: int = 1) -> Timetable:
    """Rank r owns stages r and 2p - 1 - r; it holds up to (2p + 1 + 2(S - 1))/S stage-activations.

    Backwards are whole in the middle of the step. They are split at its beginning and its end, where whole
    ones would leave a bubble. Raises PlanError below 2p + S - 1 units.

    p=2, m=4:
        0F0 0F1 0F2 3F0 3B0 3W0 3F1 0F3 3BW1 3F2 0BW0 3BW2 3F3 0BW1 3BW3 0B2 0W2 0B3 0W3
        1F0 2F0 1F1 2F1 1F2 2BW0 2F2 1BW0 1F3 2BW1 2F3 1BW1 2BW2 1BW2 2B3 1B3 2W3 1W3
    """
    ahead = num_slices - 1
    least = -(-(2 * num_ranks + ahead) // num_slices)
    if num_microbatches < least:
        formula = "2 * num_ranks" if num_slices == 1 else "(2 * num_ranks - 1) / num_slices + 1"
        raise PlanError(
            f"dualpipe_v needs num_microbatches >= {formula} = {least}, got {num_microbatches}; "
            "zb_v runs with any number"
        )
    num_units = num_microbatches * num_slices
    return Timetable(
        numbered(_order(num_ranks, rank, num_units, ahead), num_slices) for rank in range(num_ranks)
    )


def _order(num_ranks: int, rank: int, num_units: int, ahead: int) -> list[StageOp]:
    """The ops of one rank; f0, b0, w0, bw0 are those of its first stage, f1, b1, w1, bw1 of its second.

    ahead: how many units further than without slices its F's are ahead of its backwards.
    """
    (f0, b0, w0, bw0), (f1, b1, w1, bw1) = (
        [(stage, op) for op in (Op.F, Op.B, Op.W, Op.BW)] for stage in (rank, 2 * num_ranks - 1 - rank)
    )
    ranks_below = num_ranks - 1 - rank
    # Warm-up.
    order = [f0] * (2 * ranks_below)
    order += [f0, f1] * (rank + 1 + ahead)
    order += [b1, w1, f1] * ranks_below
    # Steady phase; then no f0 is left.
    order += [f0, bw1, f1, bw0] * (num_units - 2 * num_ranks + rank + 1 - ahead)
    order += [bw1, f1, bw0] * ranks_below
    order += [bw1, bw0] * ahead
    # End: 2(rank + 1) backwards, second stage and first stage in turn. The first half are whole, the second
    # half split.
    turns = [(bw1, b1, w1), (bw0, b0, w0)] * (rank + 1)
    whole, split = turns[: rank + 1], turns[rank + 1 :]
    order += [bw for bw, _, _ in whole]
    order += [b for _, b, _ in split]
    # W's in the order of their B's: one before each b0 that is left, then the rest.
    waiting = [w for _, _, w in split] + [w0] * ranks_below
    for w in waiting[:ranks_below]:
        order += [w, b0]
    order += waiting[ranks_below:]
    return order

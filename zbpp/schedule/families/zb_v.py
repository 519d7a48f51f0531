"""ZB-V, of "Pipeline Parallelism with Controllable Memory" (arXiv:2405.15362).

Each rank owns two stages, and the stages lie in a V:

    rank 0   stage 0         stage 2p - 1
    rank 1     stage 1     stage 2p - 2
    ...
    rank p-1     stage p - 1, stage p

So the last rank runs the middle of the model, and rank 0 has both the first stage and the last, where the
backward begins.
"""

from zbpp.schedule.timetable import Op, StageOp, Timetable, numbered


def zb_v(num_ranks: int, num_microbatches: int, *, num_slices: int = 1) -> Timetable:
    """Rank r owns stages r and 2p - 1 - r; every rank holds 2(p + S - 1)/S stage-activations, as in 1F1B.

    The bubble is 0 at F = B = W if mS >= 2p - 1 + S - 1. With fewer microbatches the timetable is the one for
    so many, without the actions of the surplus ones.

    p=2, m=3:
        0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2
        1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2
    """
    ahead = num_slices - 1
    padded = max(-(-(2 * num_ranks - 1 + ahead) // num_slices), num_microbatches) * num_slices
    rows = [numbered(_order(num_ranks, rank, padded, ahead), num_slices) for rank in range(num_ranks)]
    return Timetable(row.select(row.microbatches < num_microbatches * num_slices) for row in rows)


def _order(num_ranks: int, rank: int, num_units: int, ahead: int) -> list[StageOp]:
    """The ops of one rank; f0, b0, w0 are those of its first stage, f1, b1, w1 of its second.

    ahead: how many units further than without slices its F's are ahead of its B's.
    """
    (f0, b0, w0), (f1, b1, w1) = (
        [(stage, op) for op in (Op.F, Op.B, Op.W)] for stage in (rank, 2 * num_ranks - 1 - rank)
    )
    # Warm-up: forwards alone, until the first microbatch is back on this rank with its gradient.
    order = [f0] * (2 * (num_ranks - rank) - 1)
    order += [f1, f0] * (rank + ahead)
    order += [f1, b1, w1] * (num_ranks - rank)
    # Steady phase: one unit on each stage in turn. With it the order has p - 1 - rank f0's too many; `zb_v`
    # drops them.
    order += [f0, b0, w0, f1, b1, w1] * (num_units - order.count(f1))
    order += [b0, w0, b1, w1] * ahead
    # End: the backwards that other ranks wait for come first, then the W's that are left.
    order += [b0, b1] * rank
    order += [b0, w0] * (num_ranks - rank)
    order += [w1] * (num_units - order.count(w1))
    order += [w0] * (num_units - order.count(w0))
    return order

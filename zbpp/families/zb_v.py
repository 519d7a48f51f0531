"""ZB-V, of "Pipeline Parallelism with Controllable Memory" (arXiv:2405.15362).

Two stages per rank, in a V: rank r owns r and 2p - 1 - r, so the last rank computes the loss's
way back at once, and rank 0 both begins and ends a microbatch.
"""

from zbpp.schedule.numbering import Word, numbered
from zbpp.schedule.timetable import Op, Row, Timetable


def zb_v(num_ranks: int, num_microbatches: int) -> Timetable:
    """Rank r owns stages r and 2p - 1 - r; holds 2p stage-activations on every rank (1F1B's memory).

    No bubble within a rank's span at F = B = W. Below 2p - 1 microbatches the pattern of 2p - 1 is
    cut to those that exist.

    p=2, m=3:
        0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2
        1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2
    """
    padded = max(2 * num_ranks - 1, num_microbatches)
    return Timetable(
        _below(num_microbatches, numbered(_words(num_ranks, rank, padded))) for rank in range(num_ranks)
    )


def _below(num_microbatches: int, row: Row) -> Row:
    """Without the padding, and without the F's that are past the last microbatch."""
    keep = row.microbatches < num_microbatches
    return Row(row.stages[keep], row.ops[keep], row.microbatches[keep])


def _words(num_ranks: int, rank: int, num_microbatches: int) -> list[Word]:
    """The order of ops on one rank; 0 and 1 name its stages on the way down and back."""
    (f0, b0, w0), (f1, b1, w1) = (
        [(stage, op) for op in (Op.F, Op.B, Op.W)] for stage in (rank, 2 * num_ranks - 1 - rank)
    )
    down, back = [f0, b0, w0], [f1, b1, w1]
    words = [f0] * (2 * (num_ranks - rank) - 1)
    words += [f1, f0] * rank
    words += back * (num_ranks - rank)
    words += (down + back) * (num_microbatches - words.count(f1))  # F0's run out first: see zb_v
    words += [b0, b1] * rank
    words += [b0, w0] * (num_ranks - rank)
    words += [w1] * (num_microbatches - words.count(w1))
    words += [w0] * (num_microbatches - words.count(w0))
    return words

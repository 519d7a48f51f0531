"""DualPipeV, DeepSeek's DualPipe cut in half (github.com/deepseek-ai/DualPipe, arXiv:2412.19437).

Two stages per rank, in a V. It was made to run an F and a backward at the same time on one rank, so
that one computes while the other waits for an all-to-all; run one after the other, as here, ZB-V
dominates it. The order is torch's ScheduleDualPipeV, its overlapped pairs written F first.
"""

from __future__ import annotations

from zbpp.schedule.numbering import Word, numbered
from zbpp.schedule.timetable import Op, PlanError, Timetable


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Timetable:
    """Rank r owns stages r and 2p - 1 - r; holds up to 2p + 1 stage-activations.

    Backwards are whole in the middle, and split where a bubble would be, in the beginning and in the
    end. Raises PlanError below 2p microbatches.

    p=2, m=4:
        0F0 0F1 0F2 3F0 3B0 3W0 3F1 0F3 3BW1 3F2 0BW0 3BW2 3F3 0BW1 3BW3 0B2 0W2 0B3 0W3
        1F0 2F0 1F1 2F1 1F2 2BW0 2F2 1BW0 1F3 2BW1 2F3 1BW1 2BW2 1BW2 2B3 1B3 2W3 1W3
    """
    if num_microbatches < 2 * num_ranks:
        raise PlanError(
            f"dualpipe_v needs num_microbatches >= 2 * num_ranks = {2 * num_ranks} to fill its V both ways, "
            f"got {num_microbatches}; zb_v runs with any number"
        )
    return Timetable(numbered(_words(num_ranks, rank, num_microbatches)) for rank in range(num_ranks))


def _words(num_ranks: int, rank: int, num_microbatches: int) -> list[Word]:
    """The order of ops on one rank; 0 and 1 name its stages on the way down and back."""
    (f0, b0, w0, bw0), (f1, b1, w1, bw1) = (
        [(stage, op) for op in (Op.F, Op.B, Op.W, Op.BW)] for stage in (rank, 2 * num_ranks - 1 - rank)
    )
    to_the_turn = num_ranks - 1 - rank
    # In the end nobody waits for a rank's last backwards but those below: half of the pairs are split.
    pairs = [(bw1, bw0), (b1, b0)]
    last = [pairs[k > rank][k % 2] for k in range(2 * (rank + 1))]
    put_off = [{b0: w0, b1: w1}[each] for each in last[rank + 1 :] + [b0] * to_the_turn]

    words = [f0] * (2 * to_the_turn)
    words += [f0, f1] * (rank + 1)
    words += [b1, w1, f1] * to_the_turn
    words += [f0, bw1, f1, bw0] * (num_microbatches - 2 * num_ranks + rank + 1)
    words += [bw1, f1, bw0] * to_the_turn
    words += last
    words += [each for w in put_off[:to_the_turn] for each in (w, b0)]
    words += put_off[to_the_turn:]
    return words

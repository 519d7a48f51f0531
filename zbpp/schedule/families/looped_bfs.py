"""Looped BFS, breadth-first pipeline parallelism (arXiv:2211.05953): a stage's microbatches in one go."""

from __future__ import annotations

from zbpp.schedule.timetable import Op, Timetable, numbered


def looped_bfs(
    num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2, num_slices: int = 1
) -> Timetable:
    """Rank r owns stages r, r + p, ...; it runs all forwards of one stage, then all of its next stage.

    The backwards are whole and go through the rank's stages in reverse. Every rank holds the activations of
    all microbatches at once, as in GPipe. For mS >= p the bubble is (p - 1)(F + B + W)/S. A stage's
    parameters are needed in two stretches of time per step, one for F and one for BW, which suits sharded
    weights.

    The paper and torch run a stage's backwards from the last microbatch to the first; here they ascend, as in
    every timetable.

    p=2, m=3:
        0F0 0F1 0F2 2F0 2F1 2F2 2BW0 2BW1 2BW2 0BW0 0BW1 0BW2
        1F0 1F1 1F2 3F0 3F1 3F2 3BW0 3BW1 3BW2 1BW0 1BW1 1BW2
    """
    num_units = num_microbatches * num_slices
    stages_of_rank = [range(rank, num_ranks * stages_per_rank, num_ranks) for rank in range(num_ranks)]
    return Timetable(
        numbered(
            [(stage, Op.F) for stage in stages for _ in range(num_units)]
            + [(stage, Op.BW) for stage in reversed(stages) for _ in range(num_units)],
            num_slices,
        )
        for stages in stages_of_rank
    )

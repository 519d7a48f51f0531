"""Looped BFS, breadth-first pipeline parallelism (arXiv:2211.05953): all of a stage, then the next."""

from __future__ import annotations

from zbpp.schedule.numbering import numbered
from zbpp.schedule.timetable import Op, Timetable


def looped_bfs(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2) -> Timetable:
    """Rank r owns stages r, r + p, ...: all forwards of its first, all of its second, ...; BW mirrored.

    Every activation of the step is held at once, as in GPipe; bubble (p - 1)(F + B + W)/v where
    m >= p, with F, B, W of a whole rank. A stage's parameters are needed twice per step, in one
    stretch each, which suits sharded weights. The paper and torch run the backwards of a stage
    from the last microbatch to the first; here they ascend, as in every timetable.

    p=2, m=3:
        0F0 0F1 0F2 2F0 2F1 2F2 2BW0 2BW1 2BW2 0BW0 0BW1 0BW2
        1F0 1F1 1F2 3F0 3F1 3F2 3BW0 3BW1 3BW2 1BW0 1BW1 1BW2
    """
    stages = [range(rank, num_ranks * stages_per_rank, num_ranks) for rank in range(num_ranks)]
    return Timetable(
        numbered(
            [(stage, Op.F) for stage in mine for _ in range(num_microbatches)]
            + [(stage, Op.BW) for stage in reversed(mine) for _ in range(num_microbatches)]
        )
        for mine in stages
    )

"""What runs beside a rank's actions, one piece at a time: reductions of gradients, copies to the host.

A rank reduces one stage at a time, in the order in which its stages are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zbpp.schedule.dataflow_arrays import complete_stages
from zbpp.schedule.timeline import Floats, Reduction
from zbpp.schedule.timetable import Row


class Stream:
    """Pieces of work, each of which starts when it is given, and when the piece before it has ended."""

    def __init__(self) -> None:
        self.free = 0.0  # when the last piece ends, in ms

    def run(self, given: float, taken: float) -> tuple[float, float]:
        """(start, end) of a piece that is given at a time and takes a time."""
        start = max(self.free, given)
        self.free = start + taken
        return start, self.free


def predicted_reductions(
    rows: Sequence[Row], ends: Sequence[Floats], reduce: Sequence[float]
) -> Iterator[Reduction]:
    """The reductions of all ranks, rank by rank, in order; without those of 0 ms.

    ends: for each row, when its actions end; reduce: how long each stage's reduction takes. In ms.
    """
    for rank, (row, ended) in enumerate(zip(rows, ends, strict=True) if any(reduce) else ()):
        stream = Stream()
        for stage, position in complete_stages(row).items():
            if reduce[stage] > 0:
                yield Reduction(stage, rank, *stream.run(float(ended[position]), reduce[stage]))

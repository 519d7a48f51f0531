"""The most that a rank holds under its row, in the unit of the costs."""

from __future__ import annotations

import numpy as np

from zbpp.schedule.copy_times import changes_of
from zbpp.schedule.costs import StageCosts
from zbpp.schedule.offload import RankOffload
from zbpp.schedule.timetable import Row


def peak_memory(row: Row, costs: StageCosts, offload: RankOffload = ()) -> float:
    """The most that the rank holds after any action of its row or any Fetch, and all the time."""
    change = np.zeros(len(row))
    stages, place = np.unique(row.stages, return_inverse=True)
    for op, per_stage in costs.memory.items():
        chosen = row.ops == op
        change[chosen] = np.array([per_stage[stage] for stage in stages.tolist()])[place[chosen]]
    if offload:
        places, amounts = zip(*changes_of(offload, costs), strict=True)
        change = np.insert(change, places, amounts)
    static: float = sum(costs.static[stage] for stage in stages.tolist())
    return float(np.cumsum(change).max()) + static

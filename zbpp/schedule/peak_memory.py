"""The most that a rank holds under its row, in the unit of the costs."""

from __future__ import annotations

import numpy as np

from zbpp.schedule.copies import changes_of
from zbpp.schedule.costs import StageCosts
from zbpp.schedule.offload import RankOffload
from zbpp.schedule.timetable import Row


def peak_memory(row: Row, costs: StageCosts, offload: RankOffload = ()) -> float:
    """The most that the rank holds after any action of its row or any Fetch, and all the time."""
    change = np.zeros(len(row))
    for op, per_stage in costs.memory.items():
        chosen = row.ops == op
        change[chosen] = np.asarray(per_stage)[row.stages[chosen]]
    if offload:
        places, amounts = zip(*changes_of(offload, costs), strict=True)
        change = np.insert(change, places, amounts)
    static: float = sum(costs.static[stage] for stage in np.unique(row.stages).tolist())
    return float(np.cumsum(change).max()) + static

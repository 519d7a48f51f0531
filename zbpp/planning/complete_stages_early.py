"""Orders a rank's last W's so that its reductions end early.

Behind a rank's last F, B or BW stand W's alone. Nothing waits for them but the reductions: of each stage,
once its last W has run. So a rank that owns several stages may run these W's stage by stage, in an order of
its own choice. The stages are then jobs of a flow shop with two machines, the rank's computation and its
reductions, one after the other. Johnson's rule (1954) gives the order in which the last reduction ends
first: stages whose W's take less time than their reduction come first, shortest W's first; then the others,
longest reduction first. If all stages have as many of these W's, the longest reduction comes first.

F's, B's and BW's run when they did. A W only frees memory, so the peak stays as it was.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from zbpp.planning.tolerance import ROUNDING
from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Op, Row, Timetable


def complete_stages_early(timetable: Timetable, costs: Costs) -> Timetable:
    """The timetable with its last W's in the order that ends the reductions first, if its makespan falls.

    Else the timetable as it is, so also if reductions take no time. Raises PlanError as `simulate` does.
    """
    stage_costs = costs.per_stage(timetable.num_stages)
    if not any(stage_costs.reduce):
        return timetable
    early = Timetable([_with_last_w_by_stage(row, stage_costs) for row in timetable.rows])
    before, after = (simulate(each, costs).makespan for each in (timetable, early))
    return early if after < before * (1 - ROUNDING) else timetable


def _with_last_w_by_stage(row: Row, costs: StageCosts) -> Row:
    """Stable: within a stage the microbatches still ascend."""
    begin = int(np.flatnonzero(row.ops != Op.W).max()) + 1
    stages: list[int] = row.stages[begin:].tolist()
    places = {stage: place for place, stage in enumerate(_by_johnsons_rule(Counter(stages), costs))}
    by_stage = np.argsort(np.array([places[stage] for stage in stages], dtype=np.int64), kind="stable")
    return row.select(np.concatenate([np.arange(begin), begin + by_stage]))


def _by_johnsons_rule(num_w: Counter[int], costs: StageCosts) -> list[int]:
    """The stages in the order in which to run their W's. num_w: how many W's of each stage."""

    def key(stage: int) -> tuple[bool, float]:
        computed, reduced = num_w[stage] * costs.duration[Op.W][stage], costs.reduce[stage]
        return (False, computed) if computed < reduced else (True, -reduced)

    return sorted(num_w, key=key)

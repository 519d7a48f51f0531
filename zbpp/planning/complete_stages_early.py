"""Orders a rank's last W's so that its reductions end early.

A row ends with W's: those behind its last F, B or BW. Nothing waits for these W's but the reductions, and a
stage's reduction waits only for the W's of that stage. So a rank that owns several stages may run them stage
by stage, the stages in any order:

    in turns         0W5 1W5 0W6 1W6 0W7 1W7
                                         [reduce 0][reduce 1]
    stage by stage   0W5 0W6 0W7 1W5 1W6 1W7
                                 [reduce 0]  [reduce 1]

This is a flow shop: each stage is a job for two machines, first the rank's computation (its W's), then its
reductions. Johnson's rule (1954) gives the order in which the last reduction ends earliest: first the stages
whose W's take less time than their reduction, shortest W's first; then the others, longest reduction first.

F's, B's and BW's run when they did. A W only frees memory, so the peak stays as it was.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from zbpp.planning.options import ROUNDING
from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Op, Row, Timetable


def complete_stages_early(timetable: Timetable, costs: Costs) -> Timetable:
    """The timetable with each row's last W's stage by stage, by Johnson's rule, if that lowers its makespan.

    Else the timetable as it is, also if reductions take no time. Raises PlanError as `simulate` does.
    """
    stage_costs = costs.per_stage(timetable.num_stages)
    if not any(stage_costs.reduce):
        return timetable
    early = Timetable([_with_last_w_by_stage(row, stage_costs) for row in timetable.rows])
    before, after = (simulate(each, costs).makespan for each in (timetable, early))
    return early if after < before * (1 - ROUNDING) else timetable


def _with_last_w_by_stage(row: Row, costs: StageCosts) -> Row:
    """The row with its last W's stage by stage; within a stage the microbatches ascend as before."""
    begin = int(np.flatnonzero(row.ops != Op.W).max()) + 1
    stages: list[int] = row.stages[begin:].tolist()
    places = {stage: place for place, stage in enumerate(_by_johnsons_rule(Counter(stages), costs))}
    by_stage = np.argsort(np.array([places[stage] for stage in stages], dtype=np.int64), kind="stable")
    return row.select(np.concatenate([np.arange(begin), begin + by_stage]))


def _by_johnsons_rule(num_w: Counter[int], costs: StageCosts) -> list[int]:
    """The stages in the order in which to run their W's. num_w: {stage: how many of its W's are ordered}."""

    def key(stage: int) -> tuple[bool, float]:
        computed, reduced = num_w[stage] * costs.duration[Op.W][stage], costs.reduce[stage]
        return (False, computed) if computed < reduced else (True, -reduced)

    return sorted(num_w, key=key)

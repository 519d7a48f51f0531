"""The figures of the steps that were measured action by action, computed in one place.

The progress line, the summary, `zbpp compare` and timeline.png show these figures, so their bubble rates
agree. They name the steps: the early steps of a run are slower than the later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zbpp.planning import RankCosts
from zbpp.runtime import measured_costs
from zbpp.schedule import Costs, Timeline, simulate
from zbpp.schedule.offload import RankOffload


class MeasuredSteps(NamedTuple):
    """Figures of measured steps, in ms.

    steps: their numbers, such as `steps 2-3, 101`. measured: the step with the median makespan. costs: the
    medians over all of them, with memory in activations of one rank's share of the model, the unit of
    `zbpp plan`. predicted: the same timetable, simulated with these costs.
    """

    steps: str
    measured: Timeline
    predicted: Timeline
    costs: Costs

    @property
    def figures(self) -> dict[str, Any]:
        """What both metrics.jsonl and summary.json hold of it."""
        return {
            "measured_steps": self.steps,
            "measured_bubble_rate": self.measured.bubble_rate,
            "predicted_bubble_rate": self.predicted.bubble_rate,
        }


def measured_steps(timelines: Mapping[int, Timeline], offload: Sequence[RankOffload]) -> MeasuredSteps:
    """The figures of timelines, at least one, by the number of their step; all are of one timetable."""
    by_makespan = sorted(timelines.values(), key=lambda timeline: timeline.makespan)
    measured = by_makespan[len(by_makespan) // 2]
    timetable = measured.timetable
    usual = RankCosts().per_stage(timetable.num_stages, timetable.num_ranks)
    costs = replace(measured_costs(*timelines.values()), saved=usual.saved, deferred=usual.deferred)
    return MeasuredSteps(_text(sorted(timelines)), measured, simulate(timetable, costs, offload), costs)


def _text(numbers: Sequence[int]) -> str:
    """`step 2`, `steps 2-3, 101`; numbers: ascending."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"step{'s' * (len(numbers) > 1)} {', '.join(words)}"

"""What `solve` is asked for: checked, and judged by the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import Action, Op, PlanError, Timetable

MOST_RANKS = 4
MOST_ACTIONS = 400
TOLERANCE = 1e-9  # relative: what sums of floats may be off by


class Case:
    """What is asked for, checked."""

    def __init__(
        self,
        rank_of: tuple[int, ...],
        num_microbatches: int,
        costs: Costs,
        memory_limit: float | Sequence[float] | None,
        objective: str,
    ) -> None:
        self.rank_of, self.num_microbatches, self.costs = rank_of, num_microbatches, costs
        self.objective = objective
        self.num_stages, self.num_ranks = len(rank_of), max(rank_of) + 1
        self._check_size()
        self.stage_costs: StageCosts = costs.per_stage(self.num_stages)
        self.limits = _limits(memory_limit, self.num_ranks)
        self._check_numbers()

    def _check_size(self) -> None:
        if self.objective not in ("makespan", "span"):
            raise PlanError(f"objective={self.objective!r}: write 'makespan' or 'span'")
        if self.num_microbatches < 1:
            raise PlanError(f"num_microbatches={self.num_microbatches}: write 1 or more")
        actions = 3 * self.num_stages * self.num_microbatches
        if self.num_ranks > MOST_RANKS or actions > MOST_ACTIONS:
            raise PlanError(
                f"`optimal` is for {MOST_RANKS} ranks and {MOST_ACTIONS} actions at most, this has "
                f"{self.num_ranks} and {actions}: use `zb_auto`, whose gap to the bound is known too"
            )

    def _check_numbers(self) -> None:
        for op in (Op.F, Op.B, Op.BW):
            if min(self.stage_costs.duration[op]) <= 0:
                raise PlanError(f"`optimal` needs actions that take time: {op} takes 0 ms on some stage")
        for rank, limit in enumerate(self.limits):
            least = sum(self.stage_costs.memory[Op.F][stage] for stage in self.stages_of(rank))
            if not least <= limit * (1 + TOLERANCE):
                raise PlanError(
                    f"memory_limit={limit:g} on rank {rank} can't hold one microbatch: {least:g} is the least"
                )

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def may_be_whole(self, stage: int) -> bool:
        """Whether a BW can do what B and W can't: be shorter, or hold less memory."""
        time, memory = self.stage_costs.duration, self.stage_costs.memory
        shorter = time[Op.BW][stage] < time[Op.B][stage] + time[Op.W][stage]
        return shorter or memory[Op.B][stage] > 0

    def one_by_one(self) -> Timetable:
        """Microbatch after microbatch with whole backwards: the least memory that is possible."""
        stages = range(self.num_stages)
        rows: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for microbatch in range(self.num_microbatches):
            for stage in stages:
                rows[self.rank_of[stage]].append(Action(stage, Op.F, microbatch))
            for stage in reversed(stages):
                rows[self.rank_of[stage]].append(Action(stage, Op.BW, microbatch))
        return Timetable(rows)

    def checked(self, timetable: Timetable) -> Timeline:
        """The timeline of a timetable that is one for this case."""
        if timetable.rank_of != self.rank_of or timetable.num_microbatches != self.num_microbatches:
            raise PlanError("the timetable to start with has another placement or number of microbatches")
        timeline = self.timeline(timetable)
        if not self.fits(timeline):
            raise PlanError(f"the timetable to start with needs {timeline.peak_memory}, above the limit")
        return timeline

    def timeline(self, timetable: Timetable) -> Timeline:
        return simulate(timetable, self.costs)

    def fits(self, timeline: Timeline) -> bool:
        peaks = zip(timeline.peak_memory, self.limits, strict=True)
        return all(peak <= limit * (1 + TOLERANCE) for peak, limit in peaks)

    def value(self, timeline: Timeline) -> float:
        """The objective in ms; infinite above the memory limit."""
        if not self.fits(timeline):
            return math.inf
        return timeline.makespan if self.objective == "makespan" else timeline.max_span


def _limits(memory_limit: float | Sequence[float] | None, num_ranks: int) -> list[float]:
    if memory_limit is None:
        return [math.inf] * num_ranks
    limits = list(memory_limit) if isinstance(memory_limit, Sequence) else [memory_limit] * num_ranks
    if len(limits) != num_ranks:
        raise PlanError(f"memory_limit has {len(limits)} numbers for {num_ranks} ranks")
    return limits

"""What is to be planned: costs, placement and limits as plain lists, which the searches share.

Every action is one integer, its id: (stage * 4 + op) * num_microbatches + microbatch. A `kind` is
the part before the microbatch. A plan is, per rank, the list of its ids in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zbpp.planning.memory_limit import least_that_works, memory_text
from zbpp.planning.messages import Messages, messages_between
from zbpp.planning.size_limit import BYTES_PER_SEARCHED_ACTION, check_size
from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Op, PlanError, Row, Timetable

Plan = list[list[int]]

# placement -> least and most stages per rank, and what to write
_STAGES = {
    "one": (1, 1, "1 (for more, write placement='looped' or 'v')"),
    "looped": (2, math.inf, "2 or more (one stage per rank is placement='one')"),
    "v": (2, 2, "2"),
}
PLACEMENTS = tuple(_STAGES)
OBJECTIVES = ("makespan", "span")


@dataclass(frozen=True)
class Problem:
    """Costs, placement, limits and objective of one search.

    limits: per rank, the highest memory level allowed (inf: none).
    objective: "makespan" (last end of all ranks) or "span" (largest span of a rank).
    """

    num_ranks: int
    num_microbatches: int
    placement: str
    rank_of: tuple[int, ...]
    given: Costs
    costs: StageCosts
    limits: tuple[float, ...]
    objective: str

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """Per rank, its stages, ascending."""
        owned: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.rank_of):
            owned[rank].append(stage)
        return owned

    @cached_property
    def duration(self) -> list[float]:
        """Time by kind."""
        return [self.costs.duration[op][stage] for stage in range(self.num_stages) for op in Op]

    @cached_property
    def memory(self) -> list[float]:
        """Change of the memory level by kind."""
        return [self.costs.memory[op][stage] for stage in range(self.num_stages) for op in Op]

    @cached_property
    def messages(self) -> Messages:
        """What waits for a message of what, and for how long."""
        return messages_between(self.rank_of, self.costs.comm)

    @cached_property
    def latency(self) -> list[float]:
        """Per stage s, the time of a message between stage s and s + 1, forward: 0 on one rank."""
        return [self._message(stage, stage + 1) for stage in range(self.num_stages - 1)]

    @cached_property
    def backward_latency(self) -> list[float]:
        """Per stage s, the time of a message from stage s + 1 back to s."""
        return [self._message(stage + 1, stage) for stage in range(self.num_stages - 1)]

    def _message(self, source: int, target: int) -> float:
        return 0.0 if self.rank_of[source] == self.rank_of[target] else self.costs.comm[source]

    @cached_property
    def fill(self) -> list[float]:
        """Per rank, when its first action starts: in every plan that is F0 of its lowest stage.

        Nothing on a rank can run before it, and the F0's above it have nothing to wait for either.
        """
        first = [min(stages) for stages in self.stages_of]
        forward = self.costs.duration[Op.F]
        return [sum(forward[s] + self.latency[s] for s in range(stage)) for stage in first]

    @cached_property
    def offsets(self) -> list[float]:
        """Per rank, what is subtracted from its last end: the objective is the largest difference."""
        return self.fill if self.objective == "span" else [0.0] * self.num_ranks

    @cached_property
    def tolerance(self) -> float:
        """Times closer than this are equal: far above rounding, far below any action."""
        return 1e-10 * self.num_microbatches * sum(self.duration)

    @cached_property
    def ceilings(self) -> list[float]:
        """The limits as levels are held against them: a level is a sum of floats."""
        return [limit * (1 + 1e-12) for limit in self.limits]

    @cached_property
    def floor(self) -> list[float]:
        """Per rank, the least memory that works.

        Any B needs all F's of its microbatch, so a rank holds `saved` of all its stages at once; one
        microbatch at a time with whole backwards needs no more.
        """
        return [sum(self.costs.memory[Op.F][stage] for stage in stages) for stages in self.stages_of]

    @cached_property
    def whole_pays(self) -> list[bool]:
        """Per stage, whether BW can ever beat B followed by W: it is shorter, or it holds less."""
        times, memory = self.costs.duration, self.costs.memory
        return [
            times[Op.BW][s] < times[Op.B][s] + times[Op.W][s] or memory[Op.B][s] > 0
            for s in range(self.num_stages)
        ]

    def require(self, floor: list[float]) -> None:
        """Raises PlanError, naming what each rank needs, if some limit is below it."""
        short = [rank for rank, least in enumerate(floor) if self.ceilings[rank] < least]
        if short:
            rank, unit = short[0], self.given.memory_unit
            limit = memory_text(self.limits[rank], unit)
            raise PlanError(
                f"memory_limit {limit} on rank {rank} can't hold one microbatch; "
                + least_that_works(floor, unit)
            )

    def id_of(self, stage: int, op: int, microbatch: int) -> int:
        return (stage * 4 + op) * self.num_microbatches + microbatch

    def with_microbatches(self, num_microbatches: int) -> Problem:
        """The same pipeline with another number of microbatches."""
        return Problem(
            self.num_ranks,
            num_microbatches,
            self.placement,
            self.rank_of,
            self.given,
            self.costs,
            self.limits,
            self.objective,
        )

    def timed(self, plan: Plan) -> float:
        """The objective of a plan; inf if it can't run, or not within memory."""
        try:
            timeline = simulate(self.timetable_of(plan), self.given)
        except PlanError:
            return math.inf
        if any(peak > most for peak, most in zip(timeline.peak_memory, self.ceilings, strict=True)):
            return math.inf
        return timeline.makespan if self.objective == "makespan" else timeline.max_span

    def plan_of(self, timetable: Timetable) -> Plan:
        """A timetable as ids."""
        number = self.num_microbatches
        return [
            ((row.stages.astype(np.int64) * 4 + row.ops) * number + row.microbatches).tolist()
            for row in timetable.rows
        ]

    def timetable_of(self, plan: Plan) -> Timetable:
        """Ids as a timetable."""
        rows = []
        for ids in plan:
            kinds, microbatches = np.divmod(np.array(ids), self.num_microbatches)
            stages, ops = np.divmod(kinds, 4)
            rows.append(Row(*(column.astype(np.int32) for column in (stages, ops, microbatches))))
        return Timetable(rows)

    def numbered(self, words: Iterable[Sequence[int]]) -> Plan:
        """Ids from kinds alone: the k-th F of a stage is its microbatch k, and so for B and W.

        BW counts as the B and the W of its microbatch, so the caller sees to it that all earlier
        B's of the stage have had their W by then.
        """
        number = self.num_microbatches
        plan = []
        for word in words:
            seen = [0] * (4 * self.num_stages)
            ids = []
            for kind in word:
                ids.append(kind * number + seen[kind])
                seen[kind] += 1
                if kind & 3 == Op.BW:
                    seen[kind - 2] += 1
                    seen[kind - 1] += 1
                elif kind & 3 == Op.B:
                    seen[kind + 2] += 1
            plan.append(ids)
        return plan


def pose(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    memory_limit: float | Sequence[float] | None,
    placement: str | None,
    stages_per_rank: int | None,
    objective: str,
) -> Problem:
    """Check the arguments of zb_auto and resolve them. Raises PlanError."""
    check_size(num_ranks, num_microbatches, stages_per_rank or 1, BYTES_PER_SEARCHED_ACTION)
    if objective not in OBJECTIVES:
        raise PlanError(f"objective={objective!r}: write one of {', '.join(OBJECTIVES)}")
    placement = placement or "one"
    rank_of = placed(num_ranks, placement, stages_per_rank)
    problem = Problem(
        num_ranks,
        num_microbatches,
        placement,
        rank_of,
        costs,
        costs.per_stage(len(rank_of)),
        _limits(memory_limit, num_ranks),
        objective,
    )
    problem.require(problem.floor)
    return problem


def placed(num_ranks: int, placement: str, stages_per_rank: int | None) -> tuple[int, ...]:
    """The owner of each stage. Raises PlanError if placement and stages_per_rank contradict each other."""
    if placement not in PLACEMENTS:
        raise PlanError(f"placement={placement!r}: write one of {', '.join(PLACEMENTS)}")
    least, most, advice = _STAGES[placement]
    per_rank = stages_per_rank if stages_per_rank is not None else max(least, min(most, 2))
    if not (isinstance(per_rank, int) and least <= per_rank <= most):
        raise PlanError(
            f"placement={placement!r} and stages_per_rank={stages_per_rank!r} contradict each other: "
            f"stages_per_rank must be {advice}, or left out"
        )
    there = tuple(range(num_ranks))
    return there + there[::-1] if placement == "v" else there * per_rank


def _limits(limit: float | Sequence[float] | None, num_ranks: int) -> tuple[float, ...]:
    if limit is None:
        return (math.inf,) * num_ranks
    numbers = list(limit) if isinstance(limit, Sequence) else [limit] * num_ranks
    if len(numbers) != num_ranks:
        raise PlanError(f"memory_limit has {len(numbers)} numbers for {num_ranks} ranks")
    for rank, number in enumerate(numbers):
        if not number >= 0:  # NaN too
            raise PlanError(f"memory_limit of rank {rank} is {number!r}: write a number, 0 or more")
    return tuple(float(number) for number in numbers)

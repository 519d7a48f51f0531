"""What is to be planned: placement, counts, costs, memory limit and objective.

The search and the bounds take a `Problem`: nothing else states what is to be planned.

Inside planning an action is one integer, its id: kind * num_units + unit, where the kind is a stage and an op
as one number (see `dataflow_arrays`). A `Plan` is a timetable in this form: per rank, the list of its ids in
order. Without slices the units are the microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zbpp.planning.dependencies import Messages, dependency_order, earliest_starts, messages_between
from zbpp.planning.memory_limit import (
    MemoryLimit,
    ceiling,
    check_holds_one_microbatch,
    fits,
    limits_per_rank,
)
from zbpp.planning.options import MAKESPAN, OBJECTIVES, ROUNDING, SPAN, check_count, objective_value
from zbpp.planning.placement import placement_name
from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.dataflow_arrays import kind_of, kinds_of, op_of, stage_of
from zbpp.schedule.interpret.exchange import hide_in_exchanges
from zbpp.schedule.row_costs import RowCosts, messages_by_kind
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import Op, PlanError, Row, Timetable, numbered

Plan = list[list[int]]


class Extent(NamedTuple):
    """The length and the square of a unit (zbpp/schedule/costs.py)."""

    length: float
    square: float


@dataclass(frozen=True)
class Problem:
    """Which timetables are allowed, and how they are compared.

    rank_of[stage]: the placement. memory_limit: in the unit of costs.saved, one number for all
    ranks, or a list with one per rank; None: no limit.
    objective: "makespan" (last end of all ranks) or "span" (the longest of the ranks' spans).
    num_slices: of each microbatch.
    Raises PlanError for what is out of range, and for a limit that can't hold one microbatch (with the
    least that works, per rank).
    """

    rank_of: tuple[int, ...]
    num_microbatches: int
    costs: Costs = Costs()
    memory_limit: MemoryLimit = None
    objective: str = MAKESPAN
    num_slices: int = 1

    def __post_init__(self) -> None:
        check_count("num_microbatches", self.num_microbatches)
        check_count("num_slices", self.num_slices)
        if self.objective not in OBJECTIVES:
            raise PlanError(f"objective={self.objective!r}: write {' or '.join(OBJECTIVES)}")
        ranks = set(self.rank_of)
        if not ranks or ranks != set(range(len(ranks))):
            raise PlanError(f"rank_of={self.rank_of}: write a rank per stage, 0..p-1 without a gap")
        self.require(self.least_memory)

    def with_microbatches(self, num_microbatches: int) -> Problem:
        """The same pipeline with the first so many microbatches, or with more of them if all are alike."""
        lengths = self.costs.lengths[:num_microbatches]
        return replace(self, num_microbatches=num_microbatches, costs=replace(self.costs, lengths=lengths))

    @cached_property
    def uniform(self) -> Problem:
        """The same work in units that are all alike; this problem if they are."""
        return replace(self, costs=self.costs.uniform) if self.has_lengths else self

    @property
    def has_lengths(self) -> bool:
        """Whether units may differ."""
        return bool(self.costs.lengths or self.costs.slice_bounds)

    @property
    def num_units(self) -> int:
        return self.num_microbatches * self.num_slices

    def extent(self, unit: int) -> Extent:
        return Extent(self.stage_costs.length(unit), self.stage_costs.square(unit))

    def of_one_unit(self, extent: Extent) -> Problem:
        """One unit of this extent, in the same pipeline."""
        return replace(self, num_microbatches=1, num_slices=1, costs=self.costs.at(*extent))

    def of_equal_units(self, extent: Extent) -> Problem:
        """The same number of units, which all have this extent."""
        number = self.num_slices
        return replace(self, costs=self.costs.at(extent.length * number, extent.square * number))

    @property
    def without_past(self) -> Problem:
        """A problem that needs no more memory."""
        is_there = any([*self.stage_costs.past, *self.stage_costs.past_gradients])
        return replace(self, costs=self.costs.without_past) if is_there else self

    @cached_property
    def unit_costs(self) -> StageCosts:
        """What a unit costs where all are alike."""
        return self.costs.at(*self.extent(0)).per_stage(self.num_stages)

    # -- the placement ------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def num_ranks(self) -> int:
        return max(self.rank_of, default=-1) + 1

    @cached_property
    def placement(self) -> str:
        """ "one", "v", "looped" or "other"."""
        return placement_name(self.rank_of)

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """Per rank, its stages, ascending."""
        owned: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.rank_of):
            owned[rank].append(stage)
        return owned

    # -- costs --------------------------------------------------------------------------------

    @cached_property
    def stage_costs(self) -> StageCosts:
        counts = self.num_stages, self.num_microbatches, self.num_slices
        return self.costs.per_stage(*counts, self.rank_of)

    def length(self, unit: int) -> float:
        return self.stage_costs.length(unit)

    @cached_property
    def has_exchange(self) -> bool:
        """Whether the time of a W depends on its place in the plan."""
        return self.costs.has_exchange

    @cached_property
    def duration(self) -> list[float]:
        """By id, the time of each action (ms), of a W that runs in no exchange."""
        times: list[float] = RowCosts(self.stage_costs).durations(self._every_action).tolist()
        return times

    @cached_property
    def memory(self) -> list[float]:
        """By id, what the action adds to its rank's memory; negative where it frees memory."""
        changes: list[float] = RowCosts(self.stage_costs).memory(self._every_action).tolist()
        return changes

    @property
    def _every_action(self) -> Row:
        """All actions, B, W and BW, in the order of their ids."""
        return self._row_of(np.arange(self.num_stages * len(Op) * self.num_units))

    def durations_of(self, unit: int) -> list[float]:
        """By kind, the time of each action of a unit (ms)."""
        return self.duration[unit :: self.num_units]

    def times_in(self, plan: Plan) -> list[float]:
        """By id, the time of each action at its place in a plan (ms).

        It is the action's duration, but for W's that run in exchanges (zbpp/schedule/interpret/exchange.py).
        """
        times = [*self.duration]
        costs = RowCosts(self.stage_costs)
        for ids, row in zip(plan, self.timetable_of(plan).rows, strict=True) if self.has_exchange else ():
            at_place, _ = hide_in_exchanges(row, np.array([times[a] for a in ids]), costs.exchange(row))
            for a, time in zip(ids, at_place.tolist(), strict=True):
                times[a] = time
        return times

    def message(self, source: int, target: int, length: float = 1.0) -> float:
        """The time (ms) of a message of a unit of this length from one stage to another.

        0 if both are on the same rank, and of an empty unit. Over a link that is occupied it takes longer.
        """
        fixed, per_length = self._message_terms(source, target)
        return fixed + length * per_length if length else 0.0

    def _message_terms(self, source: int, target: int) -> tuple[float, float]:
        """What a message takes whatever its length, and how much longer at length 1 (ms)."""
        if self.rank_of[source] == self.rank_of[target]:
            return 0.0, 0.0
        kind = kind_of(source, Op.F if target > source else Op.B)
        fixed, per_length = self._messages_by_kind
        return fixed[kind], per_length[kind]

    @cached_property
    def _messages_by_kind(self) -> tuple[list[float], list[float]]:
        fixed, per_length = messages_by_kind(self.stage_costs)
        return fixed.tolist(), per_length.tolist()

    def first_message(self, source: int, target: int) -> float:
        """`message` of unit 0."""
        return self.message(source, target, self.length(0))

    def latency(self, a: int) -> float:
        """How long (ms) the message takes that an action waits for; 0 if it waits for none."""
        kind, unit = divmod(a, self.num_units)
        return self.messages.latency(kind, self.length(unit))

    @property
    def has_queues(self) -> bool:
        """Whether a message may wait for another one on its link."""
        return self.costs.links is not None and self.costs.links.has_queues

    @cached_property
    def messages(self) -> Messages:
        """The messages that actions wait for, by kind, at length 1; from the data-flow table."""
        return messages_between(self.num_stages, self._message_terms)

    # -- memory limits ------------------------------------------------------------------------

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """Per rank, the highest memory level allowed; infinity: no limit."""
        return limits_per_rank(self.memory_limit, self.num_ranks)

    @cached_property
    def ceilings(self) -> list[float]:
        """Per rank, the most that microbatches may hold beside what is held all the time.

        With what the rounding of a level, a sum of floats, may add.
        """
        pairs = zip(self.limits, self.static, strict=True)
        return [ceiling(limit) - static for limit, static in pairs]

    @cached_property
    def static(self) -> list[float]:
        """Per rank, what its stages hold all the time."""
        return [sum(self.stage_costs.static[stage] for stage in stages) for stages in self.stages_of]

    @cached_property
    def least_memory(self) -> list[float]:
        """Per rank, the least memory that microbatches need: what the longest one holds in `one_by_one`.

        Any B comes after all F's of its microbatch, so a rank holds `saved` of all its stages at once.
        Microbatch after microbatch with whole backwards needs no more, but for gradients of the past, which
        a stage holds from its first BW to its last.
        """
        costs, lengths = self.stage_costs, self.costs.lengths
        first = self.num_slices * (lengths.index(max(lengths)) if lengths else 0)
        slices = [self.length(unit) for unit in range(first, first + self.num_slices)]
        longest, of_last_slice = math.fsum(slices), slices[-1]
        least = []
        for stages in self.stages_of:
            saved = [longest * (costs.held["saved"][stage] + costs.past[stage]) for stage in stages]
            level = most = sum(saved)
            for stage, own in zip(reversed(stages), reversed(saved), strict=True):
                change = longest * costs.past_gradients[stage] - of_last_slice * costs.held["saved"][stage]
                most, level = max(most, level + change), level - own
            least.append(most)
        return least

    def require(self, least: Sequence[float]) -> None:
        """Raises PlanError if some rank's limit is below `least` and what it holds all the time."""
        needed = [own + static for own, static in zip(least, self.static, strict=True)]
        check_holds_one_microbatch(needed, self.limits, self.costs.memory_unit)

    # -- the objective ------------------------------------------------------------------------

    def value_of(self, timeline: Timeline) -> float:
        """The objective (ms); infinity above a memory limit."""
        if not fits(timeline.peak_memory, self.limits):
            return math.inf
        return objective_value(timeline, self.objective)

    def value_of_plan(self, plan: Plan) -> float:
        """What the search counts of a plan (ms); infinity if it can't run, or needs more memory than allowed.

        Reductions do not count, see `offsets`.
        """
        try:
            timeline = simulate(self.timetable_of(plan), self.costs)
        except PlanError:
            return math.inf
        return self.value_of(replace(timeline, reductions=()))

    @cached_property
    def fill(self) -> list[float]:
        """Per rank, when its first action can start (ms).

        In every plan this action is F of unit 0 on the rank's lowest stage. If, on p ranks, each of the
        first p stages has a rank of its own (as in the placements one, looped and v), it starts at this time
        in every plan. If not, it may start later: for rank_of=(0, 0, 1) rank 0 may run 0F1 before 1F0, and
        rank 1 waits for 1F0.
        """
        starts = earliest_starts(self.num_stages, self.durations_of(0), self.first_message)
        return [starts[kind_of(stages[0], Op.F)] for stages in self.stages_of]

    @cached_property
    def offsets(self) -> list[float]:
        """Per rank, what is subtracted from its last end: the largest difference is what a search minimises.

        The span of a rank that starts later than `fill` is overestimated; see there. Reductions do not count:
        they come after all actions of a stage.
        """
        return self.fill if self.objective == SPAN else [0.0] * self.num_ranks

    @property
    def last_reduction(self) -> float:
        """How much longer (ms) than its actions a step takes at least, by its makespan."""
        return min(self.stage_costs.reduce) if self.objective == MAKESPAN else 0.0

    @cached_property
    def tolerance(self) -> float:
        """Times that differ by no more count as equal: the busiest rank's work, times ROUNDING (ms)."""
        return ROUNDING * max(self.work_of(rank) for rank in range(self.num_ranks))

    def work_of(self, rank: int) -> float:
        """The time (ms) of a rank's F's, B's and W's; the work of the uniform problem is the same."""
        times = self.uniform.unit_costs.duration
        each = (times[op][stage] for stage in self.stages_of[rank] for op in (Op.F, Op.B, Op.W))
        return self.num_units * sum(each)

    # -- plans --------------------------------------------------------------------------------

    def plan_of(self, timetable: Timetable) -> Plan:
        """A timetable as ids."""
        return [self._ids_of(row) for row in timetable.rows]

    def timetable_of(self, plan: Plan) -> Timetable:
        """Ids as a timetable."""
        return Timetable(map(self._row_of, plan))

    def _row_of(self, ids: npt.ArrayLike) -> Row:
        kinds, units = np.divmod(np.array(ids), self.num_units)
        stages, ops = np.divmod(kinds.astype(np.int32), np.int32(len(Op)))
        return Row(stages, ops, units.astype(np.int32), self.num_slices)

    def numbered(self, rows: Iterable[Sequence[int]]) -> Plan:
        """Ids from kinds in order: the k-th F of a stage is its unit k; B's and W's as `numbered` has them.

        BW counts as the B and the W of its unit, so the caller must have put the W of every earlier B of the
        stage before it.
        """
        ops = [[(stage_of(kind), Op(op_of(kind))) for kind in kinds] for kinds in rows]
        return [self._ids_of(numbered(each, self.num_slices)) for each in ops]

    def _ids_of(self, row: Row) -> list[int]:
        kinds = kinds_of(row).astype(np.int64)
        ids: list[int] = (kinds * self.num_units + row.microbatches).tolist()
        return ids


def one_by_one(problem: Problem) -> Plan:
    """Microbatch after microbatch with whole backwards: slow, but no plan needs less memory."""
    return problem.numbered(row * problem.num_microbatches for row in _one_microbatch(problem))


def _one_microbatch(problem: Problem) -> list[list[int]]:
    """Per rank, the kinds of one microbatch in order: all its slices on a stage, then on the next one."""
    rows: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    for kind in dependency_order(problem.num_stages):
        if op_of(kind) in (Op.F, Op.BW):
            rows[problem.rank_of[stage_of(kind)]] += [kind] * problem.num_slices
    return rows

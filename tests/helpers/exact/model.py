"""A problem in the terms of OR-tools CP-SAT.

One interval per action. Intervals of a rank don't overlap. An action starts after all that it waits for by
the data-flow table, plus the message if that ran on another rank. Each stage's microbatches ascend, op by op.
Memory is a stack of intervals: `saved` from the start of F to the end of B, `deferred` from there to the end
of W. Its height is never above the limit: while an F runs, it is the level after the F; while a B or W runs,
the level before it. Where a BW can pay, each backward has the choice: a BW is a B of BW's length, followed at
once by a W without length. A reduction is an interval, too; those of one rank don't overlap.

CP-SAT counts in whole numbers. Times and memory are read as the decimals that they print as
(18.522 is 18522/1000) and multiplied by the common denominator, which is exact. Where the largest sum would
pass 2**45, they are rounded down to multiples of a unit that makes this sum 2**45. The bound still holds,
since no plan gets slower by shorter actions. `value` always comes from `simulate` with the costs as given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from ortools.sat.python import cp_model

from zbpp.planning.options import EQUAL, MAKESPAN, SPAN
from zbpp.planning.problem import Problem
from zbpp.schedule.dataflow_arrays import op_of, producers, stage_of
from zbpp.schedule.timeline import Timeline
from zbpp.schedule.timetable import Action, Op, Timetable

_FINEST = 2**45


class Grid:
    """Whole numbers for decimals: exact while the largest sum stays below 2**45, else rounded down."""

    def __init__(self, numbers: Iterable[float], largest_sum: float) -> None:
        exact = math.lcm(*(Fraction(repr(float(number))).denominator for number in numbers))
        fits = exact * largest_sum <= _FINEST
        self.per_unit = Fraction(exact) if fits else Fraction(_FINEST) / Fraction(largest_sum)

    def __call__(self, number: float) -> int:
        return math.floor(Fraction(repr(float(number))) * self.per_unit)


def whole_pays(problem: Problem, stage: int) -> bool:
    """Whether BW can ever beat B followed by W: it is shorter, or B alone would raise the memory level.

    The search never takes BW for B and W: at such costs its plans may lie above the exact optimum.
    """
    times, memory = problem.stage_costs.duration, problem.stage_costs.memory
    shorter = times[Op.BW][stage] < times[Op.B][stage] + times[Op.W][stage]
    return shorter or memory[Op.B][stage] > 0


class Model:
    """The problem in CP-SAT's terms. Keys are (stage, microbatch)."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.model = problem, cp_model.CpModel()
        time, comm = problem.stage_costs.duration, problem.stage_costs.comm
        reduce = problem.stage_costs.reduce
        serial = problem.num_microbatches * (sum(map(sum, time.values())) + 2 * sum(comm)) + sum(reduce)
        stages = range(problem.num_stages)
        split = {(op, stage): time[op][stage] for op in (Op.F, Op.B, Op.W) for stage in stages}
        whole = {(Op.BW, stage): time[Op.BW][stage] for stage in stages if whole_pays(problem, stage)}
        self.grid = Grid([*split.values(), *whole.values(), *comm, *reduce], serial)
        self.horizon = self.grid(serial)
        self.time = {op: [self.grid(each) for each in per_stage] for op, per_stage in time.items()}
        self.keys = [(s, k) for s in stages for k in range(problem.num_microbatches)]
        self.whole = {key: self._whole(key) for key in self.keys}
        self.start = {
            (op, *key): self._moment(f"{op}{key}") for op in (Op.F, Op.B, Op.W) for key in self.keys
        }
        self.b_end = {key: self._moment(f"b_end{key}") for key in self.keys}
        self.end = {key: self._moment(f"end{key}") for key in self.keys}  # of W or BW
        for key in self.keys:
            self._lengths(key)
            self._microbatches_ascend(*key)
        self._dependencies()
        for rank in range(problem.num_ranks):
            self._one_at_a_time(rank)
            self._memory(rank)
        self.model.minimize(self._objective())

    def _moment(self, name: str) -> Any:
        return self.model.new_int_var(0, self.horizon, name)

    def _whole(self, key: tuple[int, int]) -> Any:
        choice = whole_pays(self.problem, key[0])
        return self.model.new_bool_var(f"whole{key}") if choice else self.model.new_constant(0)

    def _b_length(self, key: tuple[int, int]) -> Any:
        split, whole = self.time[Op.B][key[0]], self.time[Op.BW][key[0]]
        return split + (whole - split) * self.whole[key]

    def _lengths(self, key: tuple[int, int]) -> None:
        w, whole = self.start[Op.W, *key], self.whole[key]
        self.model.add(self.b_end[key] == self.start[Op.B, *key] + self._b_length(key))
        self.model.add(w == self.b_end[key]).only_enforce_if(whole)
        self.model.add(self.end[key] == w + self.time[Op.W][key[0]] * (1 - whole))

    def _microbatches_ascend(self, stage: int, k: int) -> None:
        if k == 0:
            return
        f, b, w = (self.start[op, stage, k] for op in (Op.F, Op.B, Op.W))
        before, whole = (stage, k - 1), self.whole[stage, k]
        self.model.add(f >= self._end_of(Op.F, *before))
        self.model.add(b >= self.b_end[before])
        self.model.add(w >= self.end[before]).only_enforce_if(whole.negated())
        self.model.add(b >= self.end[before]).only_enforce_if(whole)

    def _dependencies(self) -> None:
        """An action starts no earlier than its values arrive.

        A rank's first action starts exactly when they have arrived: no timetable can delay it.

        B's start stands for BW's, too: BW consumes the same values.
        """
        for kind, needed in enumerate(producers(self.problem.num_stages)):
            stage, op = stage_of(kind), Op(op_of(kind))
            if op == Op.BW:
                continue
            for k in range(self.problem.num_microbatches):
                arrivals = [self._arrival(made_by[0], stage, k) for made_by in needed]
                for arrival in arrivals:
                    self.model.add(self.start[op, stage, k] >= arrival)
                if op == Op.F and k == 0 and self._opens(stage):
                    self.model.add_max_equality(self.start[op, stage, k], [0, *arrivals])

    def _arrival(self, producer: int, stage: int, k: int) -> Any:
        """When a value from this producer is there. Where B or BW makes it, the producer is B."""
        source = stage_of(producer)
        latency = self.grid(self.problem.message(source, stage))
        return self._end_of(Op(op_of(producer)), source, k) + latency

    def _end_of(self, op: Op, stage: int, k: int) -> Any:
        """The end of F, of B (or BW in its place), of W (or BW in its place)."""
        if op == Op.F:
            return self.start[Op.F, stage, k] + self.time[Op.F][stage]
        return self.end[stage, k] if op == Op.W else self.b_end[stage, k]

    def _opens(self, stage: int) -> bool:
        """Whether this stage's first F is its rank's first action: then no timetable can delay it."""
        return stage == self.problem.stages_of[self.problem.rank_of[stage]][0]

    def _one_at_a_time(self, rank: int) -> None:
        busy = []
        for stage, k in self.keys:
            if self.problem.rank_of[stage] != rank:
                continue
            f, b, w = (self.start[op, stage, k] for op in (Op.F, Op.B, Op.W))
            end, length = self.b_end[stage, k], self.time[Op.W][stage]
            split = self.whole[stage, k].negated()
            busy.append(self.model.new_fixed_size_interval_var(f, self.time[Op.F][stage], ""))
            busy.append(self.model.new_interval_var(b, self._b_length((stage, k)), end, ""))
            busy.append(self.model.new_optional_interval_var(w, length, w + length, split, ""))
        self.model.add_no_overlap(busy)

    def _memory(self, rank: int) -> None:
        limit, memory = self.problem.ceilings[rank], self.problem.stage_costs.memory
        if math.isinf(limit):
            return
        stages = self.problem.stages_of[rank]
        saved = {stage: memory[Op.F][stage] for stage in stages}
        deferred = {stage: -memory[Op.W][stage] for stage in stages}
        grid = Grid([*saved.values(), *deferred.values()], max(limit, 1e-300))
        held, amounts = [], []
        for stage, k in self.keys:
            if stage not in saved:
                continue
            f, w, b_end = self.start[Op.F, stage, k], self.start[Op.W, stage, k], self.b_end[stage, k]
            w_end, split = w + self.time[Op.W][stage], self.whole[stage, k].negated()
            first, second = self._moment("saved for"), self._moment("deferred for")
            held.append(self.model.new_interval_var(f, first, b_end, ""))
            held.append(self.model.new_optional_interval_var(b_end, second, w_end, split, ""))
            amounts += [grid(saved[stage]), grid(deferred[stage])]
        self.model.add_cumulative(held, amounts, grid(limit))

    def _objective(self) -> Any:
        value, last = self._moment("value"), self.problem.num_microbatches - 1
        for stage, rank in enumerate(self.problem.rank_of):
            opening = self.start[Op.F, self.problem.stages_of[rank][0], 0]
            first = opening if self.problem.objective == SPAN else 0
            for end in (self.b_end[stage, last], self.end[stage, last]):
                self.model.add(value >= end - first)
        if self.problem.objective == MAKESPAN:
            for stages in self.problem.stages_of:
                self._reduce_one_at_a_time(stages, value)
        return value

    def _reduce_one_at_a_time(self, stages: list[int], value: Any) -> None:
        """A rank reduces one stage at a time. The order is free: the order of completion, which the runtime
        takes, is as good as any.
        """
        last, reductions = self.problem.num_microbatches - 1, []
        reduce = self.problem.stage_costs.reduce
        for stage in filter(reduce.__getitem__, stages):  # those whose reduction takes time
            start, length = self._moment(f"reduce{stage}"), self.grid(reduce[stage])
            self.model.add(start >= self.end[stage, last])
            self.model.add(value >= start + length)
            reductions.append(self.model.new_fixed_size_interval_var(start, length, ""))
        self.model.add_no_overlap(reductions)

    def hint(self, timeline: Timeline) -> None:
        """Let the solver begin at a timeline. Where BW can't pay, a BW becomes B and, at once, its W."""
        for row, starts in zip(timeline.timetable.rows, timeline.starts, strict=True):
            for (stage, op, k), moment in zip(row, starts.tolist(), strict=True):
                at = self.grid(moment)
                if op == Op.BW:
                    self.model.add_hint(self.start[Op.B, stage, k], at)
                    self.model.add_hint(self.start[Op.W, stage, k], at + self.time[Op.B][stage])
                else:
                    self.model.add_hint(self.start[op, stage, k], at)
                if op in (Op.B, Op.BW) and whole_pays(self.problem, stage):
                    self.model.add_hint(self.whole[stage, k], op == Op.BW)

    def solve(self, time_limit: float, seed: int, enough: float) -> tuple[list[Timetable], float]:
        """The best timetable found, if any, and a lower bound (ms). A value of `enough` ends the search."""
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = 1
        per_ms = float(self.grid.per_unit)

        status = solver.solve(self.model, _StopAt(enough * (1 + EQUAL) * per_ms))
        found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        return ([self._timetable(solver)] if found else []), solver.best_objective_bound / per_ms

    def _timetable(self, solver: Any) -> Timetable:
        rows: list[list[tuple[int, int, Action]]] = [[] for _ in range(self.problem.num_ranks)]
        for stage, k in self.keys:
            row, whole = rows[self.problem.rank_of[stage]], solver.value(self.whole[stage, k])
            for op in (Op.F, Op.BW) if whole else (Op.F, Op.B, Op.W):
                at = solver.value(self.start[Op.B if op == Op.BW else op, stage, k])
                row.append((at, at + self.time[op][stage], Action(stage, op, k)))
        return Timetable([action for *_, action in sorted(row)] for row in rows)


class _StopAt(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]  # OR-tools has no types
    """Ends the search at a plan with this value."""

    def __init__(self, enough: float) -> None:
        super().__init__()
        self._enough = enough

    def on_solution_callback(self) -> None:
        if self.objective_value <= self._enough:
            self.stop_search()

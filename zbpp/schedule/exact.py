"""The best timetable there is, for small cases, by OR-tools CP-SAT; with its proof, if time allows.

The model: one interval per action. Intervals of a rank don't overlap; an F or B starts when its
message has arrived; each stage's microbatches ascend, op by op. Memory is a stack of intervals:
`saved` from the start of F to the end of B, `deferred` from there to the end of W, never above the
limit (while an F or a B runs, this counts the level after it). Where a whole BW is cheaper than
B + W, or needs less memory, each backward has the choice.

CP-SAT counts in whole numbers. Times and memory are read as the decimals that they print as
(18.522 is 18522/1000) and multiplied by the common denominator: exact. Only where that would pass
2**45 are they rounded, down, to a grid that fine: then the bound still holds, since no plan gets
slower by shorter actions. `value` always comes from `simulate` with the costs as given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zbpp.schedule.costs import Costs, StageCosts
from zbpp.schedule.simulate import Timeline, simulate
from zbpp.schedule.timetable import Action, Op, PlanError, Timetable

MOST_RANKS = 4
MOST_ACTIONS = 400

Progress = Callable[[float, float], None]

_FINEST = 2**45


@dataclass(frozen=True)
class Exact:
    """A timetable, what it costs (ms), and what none can undercut; proved: the two are equal."""

    timetable: Timetable
    value: float
    bound: float
    proved: bool


def optimal(
    num_ranks: int,
    num_microbatches: int,
    *,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
    placement: str | None = None,
    stages_per_rank: int | None = None,
    objective: str = "makespan",
    time_limit: float = 10.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Timetable:
    """The timetable with the smallest makespan or max span, as far as the time (s) allows.

    placement: "one" (None), "looped" or "v"; stages_per_rank: None for one, else two.
    memory_limit: in the unit of costs.saved, per rank or one per rank.
    `solve` says whether the result is proved. Raises PlanError as `solve` does.
    """
    rank_of = _rank_of(num_ranks, placement, stages_per_rank)
    return solve(
        rank_of,
        num_microbatches,
        costs=costs,
        memory_limit=memory_limit,
        objective=objective,
        time_limit=time_limit,
        seed=seed,
        progress=progress,
    ).timetable


def solve(
    rank_of: Sequence[int],
    num_microbatches: int,
    *,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
    objective: str = "makespan",
    time_limit: float = 10.0,
    seed: int = 0,
    start: Timetable | None = None,
    known_bound: float = 0.0,
    progress: Progress | None = None,
) -> Exact:
    """The best timetable for a placement, rank_of[stage], with its proof status.

    start: a timetable to begin with (of this placement, within the limit); the result is never
    worse. known_bound: a lower bound in ms that the caller vouches for; it only shortens the proof.
    progress(share of the time spent, best value so far) is called at each step forward.
    Raises PlanError without OR-tools, above 4 ranks or 400 actions, for a limit that can't
    hold one microbatch, for actions that take no time, and for a start that doesn't fit.
    """
    case = _Case(tuple(rank_of), num_microbatches, costs or Costs(), memory_limit, objective)
    first = start or case.one_by_one()
    model = _Model(case, _cp_model())
    model.hint(case.checked(first))
    model.at_least(known_bound)
    found, bound = model.solve(time_limit, seed, progress)
    best = min([first, *found], key=case.value)
    value, bound = case.value(best), max(bound, known_bound)
    return Exact(best, value, min(bound, value), proved=value <= bound + 1e-9 * max(value, 1e-300))


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise PlanError("`optimal` needs OR-tools: pip install 'zbpp[solver]'") from None
    return cp_model


def _rank_of(num_ranks: int, placement: str | None, stages_per_rank: int | None) -> tuple[int, ...]:
    there = tuple(range(num_ranks))
    own = {None: 1, "one": 1, "v": 2, "looped": 2}
    if placement not in own:
        raise PlanError(f"placement={placement!r}: write 'one', 'looped' or 'v'")
    per_rank = stages_per_rank or own[placement]
    if placement is None and per_rank > 1:
        placement = "looped"
    if placement == "v" and per_rank == 2:
        return there + there[::-1]
    if placement == "looped" or (per_rank == 1 and placement != "v"):
        return there * per_rank
    raise PlanError(f"placement={placement!r} has {own[placement]} stage(s) per rank, not {stages_per_rank}")


class _Case:
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
            if not least <= limit * (1 + 1e-9):
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
        timeline = simulate(timetable, self.costs)
        if not self.fits(timeline):
            raise PlanError(f"the timetable to start with needs {timeline.peak_memory}, above the limit")
        return timeline

    def fits(self, timeline: Timeline) -> bool:
        peaks = zip(timeline.peak_memory, self.limits, strict=True)
        return all(peak <= limit * (1 + 1e-9) for peak, limit in peaks)

    def value(self, timetable: Timetable) -> float:
        timeline = simulate(timetable, self.costs)
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


class _Grid:
    """Whole numbers for decimals: exact while the largest sum stays below 2**45, else rounded down."""

    def __init__(self, numbers: Iterable[float], largest_sum: float) -> None:
        exact = math.lcm(*(Fraction(repr(float(number))).denominator for number in numbers))
        fits = exact * largest_sum <= _FINEST
        self.per_unit = Fraction(exact) if fits else Fraction(_FINEST) / Fraction(largest_sum)

    def __call__(self, number: float) -> int:
        return math.floor(Fraction(repr(float(number))) * self.per_unit)


class _Model:
    """The case in CP-SAT's terms. Keys are (stage, microbatch)."""

    def __init__(self, case: _Case, cp: Any) -> None:
        self.case, self.cp, self.model = case, cp, cp.CpModel()
        time, comm = case.stage_costs.duration, case.stage_costs.comm
        serial = case.num_microbatches * (sum(map(sum, time.values())) + 2 * sum(comm))
        stages = range(case.num_stages)
        apart = {(op, stage): time[op][stage] for op in (Op.F, Op.B, Op.W) for stage in stages}
        whole = {(Op.BW, stage): time[Op.BW][stage] for stage in stages if case.may_be_whole(stage)}
        self.grid = _Grid([*apart.values(), *whole.values(), *comm], serial)
        self.horizon = self.grid(serial)
        self.time = {op: [self.grid(each) for each in per_stage] for op, per_stage in time.items()}
        self.keys = [(s, k) for s in range(case.num_stages) for k in range(case.num_microbatches)]
        self.whole = {key: self._whole(key) for key in self.keys}
        self.start = {
            (op, *key): self._moment(f"{op}{key}") for op in (Op.F, Op.B, Op.W) for key in self.keys
        }
        self.b_end = {key: self._moment(f"b_end{key}") for key in self.keys}
        self.end = {key: self._moment(f"end{key}") for key in self.keys}  # of W or BW
        self._order()
        self._messages()
        for rank in range(case.num_ranks):
            self._one_at_a_time(rank)
            self._memory(rank)
        self.objective = self._objective()
        self.model.minimize(self.objective)

    def _moment(self, name: str) -> Any:
        return self.model.new_int_var(0, self.horizon, name)

    def _whole(self, key: tuple[int, int]) -> Any:
        choice = self.case.may_be_whole(key[0])
        return self.model.new_bool_var(f"whole{key}") if choice else self.model.new_constant(0)

    def _b_length(self, key: tuple[int, int]) -> Any:
        split, whole = self.time[Op.B][key[0]], self.time[Op.BW][key[0]]
        return split + (whole - split) * self.whole[key]

    def _order(self) -> None:
        """F < B < W of a microbatch, and microbatches in their order."""
        for stage, k in self.keys:
            f, b, w = (self.start[op, stage, k] for op in (Op.F, Op.B, Op.W))
            end, whole = self.end[stage, k], self.whole[stage, k]
            self.model.add(b >= f + self.time[Op.F][stage])
            self.model.add(self.b_end[stage, k] == b + self._b_length((stage, k)))
            self.model.add(w >= self.b_end[stage, k])
            # A BW's W has no time of its own: it is where B ends.
            self.model.add(w == self.b_end[stage, k]).only_enforce_if(whole)
            self.model.add(end == w + self.time[Op.W][stage] * (1 - whole))
            if k == 0:
                continue
            self.model.add(f >= self.start[Op.F, stage, k - 1] + self.time[Op.F][stage])
            self.model.add(b >= self.b_end[stage, k - 1])
            self.model.add(w >= self.end[stage, k - 1]).only_enforce_if(whole.negated())
            self.model.add(b >= self.end[stage, k - 1]).only_enforce_if(whole)

    def _messages(self) -> None:
        for stage, k in self.keys:
            if stage == 0:
                continue
            x, g = (self._latency(a, b) for a, b in ((stage - 1, stage), (stage, stage - 1)))
            sent = self.start[Op.F, stage - 1, k] + self.time[Op.F][stage - 1]
            self.model.add(self.start[Op.F, stage, k] >= sent + x)
            self.model.add(self.start[Op.B, stage - 1, k] >= self.b_end[stage, k] + g)
            if k == 0 and self._opens(stage):
                self.model.add(self.start[Op.F, stage, k] == sent + x)
        self.model.add(self.start[Op.F, 0, 0] == 0)

    def _latency(self, source: int, target: int) -> int:
        same = self.case.rank_of[source] == self.case.rank_of[target]
        return 0 if same else self.grid(self.case.stage_costs.comm[source])

    def _opens(self, stage: int) -> bool:
        """A rank's first action can't wait by choice: a timetable says nothing that comes before it."""
        return stage == min(self.case.stages_of(self.case.rank_of[stage]))

    def _one_at_a_time(self, rank: int) -> None:
        busy = []
        for stage, k in self.keys:
            if self.case.rank_of[stage] != rank:
                continue
            f, b, w = (self.start[op, stage, k] for op in (Op.F, Op.B, Op.W))
            end, length = self.b_end[stage, k], self.time[Op.W][stage]
            split = self.whole[stage, k].negated()
            busy.append(self.model.new_fixed_size_interval_var(f, self.time[Op.F][stage], ""))
            busy.append(self.model.new_interval_var(b, self._b_length((stage, k)), end, ""))
            busy.append(self.model.new_optional_interval_var(w, length, w + length, split, ""))
        self.model.add_no_overlap(busy)

    def _memory(self, rank: int) -> None:
        limit, memory = self.case.limits[rank], self.case.stage_costs.memory
        if math.isinf(limit):
            return
        stages = self.case.stages_of(rank)
        saved = {stage: memory[Op.F][stage] for stage in stages}
        deferred = {stage: -memory[Op.W][stage] for stage in stages}
        grid = _Grid([limit, *saved.values(), *deferred.values()], max(limit, 1e-300))
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
        value, last = self._moment("value"), self.case.num_microbatches - 1
        for stage, rank in enumerate(self.case.rank_of):
            opening = self.start[Op.F, min(self.case.stages_of(rank)), 0]
            first = opening if self.case.objective == "span" else 0
            self.model.add(value >= self.end[stage, last] - first)
        return value

    def hint(self, timeline: Timeline) -> None:
        """Begin at a timeline; a BW of a stage without the choice is a B and its W at once."""
        for row, starts in zip(timeline.timetable.rows, timeline.starts, strict=True):
            for (stage, op, k), moment in zip(row, starts.tolist(), strict=True):
                at = self.grid(moment)
                if op == Op.BW:
                    self.model.add_hint(self.start[Op.B, stage, k], at)
                    self.model.add_hint(self.start[Op.W, stage, k], at + self.time[Op.B][stage])
                else:
                    self.model.add_hint(self.start[op, stage, k], at)
                if op != Op.F and self.case.may_be_whole(stage):
                    self.model.add_hint(self.whole[stage, k], op == Op.BW)

    def at_least(self, bound: float) -> None:
        """Let the search stop at a bound (ms) that is known."""
        self.model.add(self.objective >= self.grid(bound))

    def solve(self, time_limit: float, seed: int, progress: Progress | None) -> tuple[list[Timetable], float]:
        """The best timetable found, if any, and a lower bound in ms."""
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = 1
        per_ms = float(self.grid.per_unit)
        watcher = None if progress is None else _watcher(self.cp, progress, time_limit, per_ms)
        status = solver.solve(self.model, watcher)
        found = status in (self.cp.OPTIMAL, self.cp.FEASIBLE)
        return ([self._timetable(solver)] if found else []), solver.best_objective_bound / per_ms

    def _timetable(self, solver: Any) -> Timetable:
        rows: list[list[tuple[int, int, Action]]] = [[] for _ in range(self.case.num_ranks)]
        for stage, k in self.keys:
            row, whole = rows[self.case.rank_of[stage]], solver.value(self.whole[stage, k])
            for op in (Op.F, Op.BW) if whole else (Op.F, Op.B, Op.W):
                at = solver.value(self.start[Op.B if op == Op.BW else op, stage, k])
                row.append((at, at + self.time[op][stage], Action(stage, op, k)))
        return Timetable([action for *_, action in sorted(row)] for row in rows)


def _watcher(cp: Any, progress: Progress, time_limit: float, per_ms: float) -> Any:
    class Watcher(cp.CpSolverSolutionCallback):  # type: ignore[misc]  # its base comes with the import
        def on_solution_callback(self) -> None:
            progress(min(1.0, self.wall_time / time_limit), self.objective_value / per_ms)

    return Watcher()

"""The planner of Zero Bubble (arXiv:2401.10241, section 3.1): memory-limited, one stage per rank.

A line of ranks is filled microbatch by microbatch: F's travel down, B's come back up, and W's go
where a rank would wait, or where memory is short. Three of its choices can go either way, and none
is always right, so all eight combinations run and the smallest max span wins:

    early    before the first B, take an F even if B could already start when that F ends
    backward when an F and a B compete, let the F wait unless it costs B nothing
    lazy     leave a short wait idle, if some rank has lost more already, instead of putting a W in it
"""

from __future__ import annotations

import itertools

from zbpp.planning.problem import Plan, Problem
from zbpp.schedule.costs import Costs
from zbpp.schedule.timetable import Op, Timetable

F, B, W = int(Op.F), int(Op.B), int(Op.W)


def zb_1p(num_ranks: int, num_microbatches: int, *, costs: Costs = Costs()) -> Timetable:
    """The paper's ZB-1p: one stage per rank, the memory of 1F1B, the smallest max span for these costs.

    p=3, m=4:
        0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
        1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
        2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3
    """
    return _within(1, num_ranks, num_microbatches, costs)


def zb_2p(num_ranks: int, num_microbatches: int, *, costs: Costs = Costs()) -> Timetable:
    """The paper's ZB-2p: as `zb_1p`, with twice that memory.

    p=3, m=4:
        0F0 0F1 0F2 0F3 0B0 0W0 0B1 0W1 0B2 0W2 0B3 0W3
        1F0 1F1 1F2 1B0 1F3 1B1 1W0 1B2 1W1 1B3 1W2 1W3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2W0 2W1 2W2 2W3
    """
    return _within(2, num_ranks, num_microbatches, costs)


def memory_of_1f1b(costs: Costs, num_ranks: int) -> float:
    """1.0p: the activations of p microbatches, of the rank where they are largest. costs: per rank."""
    return num_ranks * max(costs.per_stage(num_ranks).memory[Op.F])


def _within(multiple: int, num_ranks: int, num_microbatches: int, costs: Costs) -> Timetable:
    limit = multiple * memory_of_1f1b(costs, num_ranks)
    problem = Problem.placed(num_ranks, num_microbatches, costs=costs, memory_limit=limit, objective="span")
    return problem.timetable_of(paper_plan(problem))


def paper_plan(problem: Problem) -> Plan:
    """The best of the planner's eight runs by max span, as in the paper's ZB-1p and ZB-2p columns.

    Raises PlanError if B's need more memory than a rank has: this planner knows no whole backward.
    """
    memory = problem.stage_costs.memory
    floor = [max(held, held + memory[Op.B][rank]) for rank, held in enumerate(memory[Op.F])]
    problem.require(floor)
    runs = [_Line(problem, *choices).run() for choices in itertools.product((False, True), repeat=3)]
    return min(runs, key=lambda run: run.max_span).plan()


class _Line:
    """One run. Per rank: how many F, B, W are placed, the clock, the memory level, the wait so far."""

    def __init__(self, problem: Problem, early: bool, backward: bool, lazy: bool) -> None:
        self.problem = problem
        self.early, self.backward, self.lazy = early, backward, lazy
        ranks = range(problem.num_ranks)
        self.last, self.number = problem.num_ranks - 1, problem.num_microbatches
        self.time = [[problem.stage_costs.duration[op][rank] for rank in ranks] for op in (Op.F, Op.B, Op.W)]
        self.change = [[problem.stage_costs.memory[op][rank] for rank in ranks] for op in (Op.F, Op.B, Op.W)]
        most, of_b = problem.ceilings, self.change[B]
        after_f = [level - max(0.0, more) for level, more in zip(most, of_b, strict=True)]
        self.most = [after_f, most]  # the level after F leaves room for what a B may add, after B
        self.done = [[0 for _ in ranks] for _ in range(3)]
        self.ends: list[list[list[float]]] = [[[] for _ in ranks] for _ in range(2)]  # of F's, of B's
        self.clock, self.level, self.waited = ([0.0 for _ in ranks] for _ in range(3))
        self.longest_wait = 0.0
        self.words: list[list[int]] = [[] for _ in ranks]

    def run(self) -> _Line:
        self._warm_up()
        for microbatch in range(1, self.number):
            for rank in self._forwards_wanted():
                self._make_room(rank, F)
                self._fill_wait(rank, self._arrival(F, rank))
                self._put(rank, F)
            for rank in range(self.last, -1, -1):
                self._make_room(rank, B)
                self._fill_wait(rank, self._arrival(B, rank))
                if rank == 0 and self.done[F][0] == self.number:
                    self._flush(0, microbatch)
                self._put(rank, B)
        for rank in range(self.last + 1):
            self._flush(rank, self.number)
        return self

    @property
    def max_span(self) -> float:
        return max(end - first for end, first in zip(self.clock, self.problem.fill, strict=True))

    def plan(self) -> Plan:
        return self.problem.numbered(self.words)

    def _arrival(self, op: int, rank: int) -> float:
        """When the input of a rank's next F or B is there."""
        microbatch = self.done[op][rank]
        if op == F:
            return self.ends[F][rank - 1][microbatch] + self.problem.latency[rank - 1] if rank else 0.0
        if rank == self.last:
            return 0.0
        return self.ends[B][rank + 1][microbatch] + self.problem.backward_latency[rank]

    def _put(self, rank: int, op: int) -> None:
        start = self.clock[rank] if op == W else max(self.clock[rank], self._arrival(op, rank))
        if self.done[F][rank]:
            self.waited[rank] += start - self.clock[rank]
            self.longest_wait = max(self.longest_wait, self.waited[rank])
        self.clock[rank] = start + self.time[op][rank]
        self.level[rank] += self.change[op][rank]
        if op != W:
            self.ends[op][rank].append(self.clock[rank])
        self.done[op][rank] += 1
        self.words[rank].append(rank * 4 + op)

    # -- until the first B ------------------------------------------------------------------

    def _warm_up(self) -> None:
        for rank in range(self.last + 1):
            self._put(rank, F)
        for rank, more in enumerate(self._warm_up_sizes()):
            for _ in range(more):
                self._put(rank, F)
        for rank in range(self.last, -1, -1):
            self._put(rank, B)

    def _warm_up_sizes(self) -> list[int]:
        """F's that each rank takes beyond its first while it waits for the first B."""
        sizes = [0] * (self.last + 1)
        first_b = self.clock[self.last] + self.time[B][self.last]  # its end, one rank down the line
        for rank in range(self.last - 1, -1, -1):
            arrival = first_b + self.problem.backward_latency[rank]
            sizes[rank], clock = self._fitting(rank, arrival)
            first_b = max(clock, arrival) + self.time[B][rank]
        for rank in range(1, self.last + 1):  # a rank can't be as far as the one that feeds it
            fed = sizes[rank - 1]
            sizes[rank] = min(sizes[rank], fed if 1 + fed == self.number else max(fed - 1, 0))
        return sizes

    def _fitting(self, rank: int, arrival: float) -> tuple[int, float]:
        clock, level, taken = self.clock[rank], self.level[rank], 0
        while 1 + taken < self.number and level + self.change[F][rank] <= self.most[F][rank]:
            too_late = clock >= arrival if self.early else clock + self.time[F][rank] > arrival
            if too_late:
                break
            clock, level, taken = clock + self.time[F][rank], level + self.change[F][rank], taken + 1
        return taken, clock

    # -- one microbatch further -------------------------------------------------------------

    def _forwards_wanted(self) -> list[int]:
        """The ranks that run an F before their next B. A rank that does feeds all after it."""
        wanted = [self._wants_forward(rank) for rank in range(self.last + 1)]
        for rank in range(self.last - 1, -1, -1):
            wanted[rank] = wanted[rank] and wanted[rank + 1]
        return [rank for rank, wants in enumerate(wanted) if wants]

    def _wants_forward(self, rank: int) -> bool:
        forwards = self.done[F]
        if forwards[rank] >= self.number:
            return False
        ahead = rank < self.last and forwards[rank] >= forwards[rank + 1] + 2
        if not (self.backward and ahead):
            return True
        after = rank + 1
        next_b = (
            self.clock[after]
            + self.time[F][after]
            + self.time[B][after]
            + self.problem.backward_latency[rank]
        )
        if self.clock[rank] >= next_b:
            return False
        if self.clock[rank] + self._time_of_forward(rank) <= next_b:
            return True
        return next_b - self.clock[rank] > self.longest_wait - self.waited[rank]

    def _time_of_forward(self, rank: int) -> float:
        """An F, and the W's that must make room for it."""
        time, level = self.time[F][rank], self.level[rank] + self.change[F][rank]
        for _ in range(self.done[B][rank] - self.done[W][rank]):
            if level <= self.most[F][rank]:
                break
            time, level = time + self.time[W][rank], level + self.change[W][rank]
        return time

    def _make_room(self, rank: int, op: int) -> None:
        while self.level[rank] + self.change[op][rank] > self.most[op][rank]:
            self._put(rank, W)

    def _fill_wait(self, rank: int, arrival: float) -> None:
        """W's into the wait for an input: whole ones, then one that delays it a little."""
        while self._has_w(rank) and self.clock[rank] + self.time[W][rank] <= arrival:
            self._put(rank, W)
        wait = arrival - self.clock[rank]
        if self._has_w(rank) and wait > 0:
            hidden = wait <= self.longest_wait - self.waited[rank]
            if not (hidden and self.lazy):
                self._put(rank, W)

    def _has_w(self, rank: int) -> bool:
        return self.done[W][rank] < self.done[B][rank]

    def _flush(self, rank: int, number: int) -> None:
        while self.done[W][rank] < number:
            self._put(rank, W)

"""The planner of Zero Bubble (arXiv:2401.10241, section 3.1): memory-limited, one stage per rank.

The plan grows microbatch by microbatch: its F's go down the ranks, its B's come back up, and W's go
where a rank would wait, or where memory is short. Three choices can go either way, and neither way
is always right, so all eight combinations run and the smallest max span wins:

    early    before the first B, run an F even if the B could start before that F ends
    backward where a rank is two F's ahead of the next one, let its F wait for the B, unless the F ends before
             the B can start, or the wait would make this the rank that has waited longest in all
    lazy     leave a short wait idle, if some rank has waited longer in all, instead of running a W
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from zbpp.planning.placement import place_stages
from zbpp.planning.problem import Plan, Problem
from zbpp.schedule.costs import Costs
from zbpp.schedule.dataflow_arrays import kind_of, op_of, stage_of
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


def _within(multiple: int, num_ranks: int, num_microbatches: int, costs: Costs) -> Timetable:
    # p times the largest `saved` of a stage: 1F1B holds no more.
    costs = costs.uniform
    limit = multiple * num_ranks * max(costs.per_stage(num_ranks).memory[Op.F])
    costs = replace(costs, static=0.0)  # the limit is for activations
    problem = Problem(place_stages(num_ranks, "one"), num_microbatches, costs, limit, "span")
    return problem.timetable_of(paper_plan(problem))


def paper_plan(problem: Problem) -> Plan:
    """The best of the planner's eight runs by max span, as in the paper's ZB-1p and ZB-2p columns.

    Microbatches that differ are planned by their mean. Raises PlanError if an F and its B need more memory
    than a rank has: this planner has no BW.
    """
    problem = problem.uniform
    memory = problem.unit_costs.memory
    problem.require([held + max(0.0, memory[Op.B][rank]) for rank, held in enumerate(memory[Op.F])])
    runs = [_Run(problem, *choices).run() for choices in itertools.product((False, True), repeat=3)]
    return min(runs, key=lambda run: run.max_span).plan()


class _Run:
    """One run. Lists by rank: actions done, when the last one ends, memory level, time waited."""

    def __init__(self, problem: Problem, early: bool, backward: bool, lazy: bool) -> None:
        self.problem = problem
        self.early, self.backward, self.lazy = early, backward, lazy
        ranks = range(problem.num_ranks)
        self.last, self.number = problem.num_ranks - 1, problem.num_microbatches
        self.time = [[problem.unit_costs.duration[op][rank] for rank in ranks] for op in (Op.F, Op.B, Op.W)]
        self.change = [[problem.unit_costs.memory[op][rank] for rank in ranks] for op in (Op.F, Op.B, Op.W)]
        after_b = problem.ceilings
        after_f = [most - max(0.0, added) for most, added in zip(after_b, self.change[B], strict=True)]
        self.most = [after_f, after_b]  # the highest memory level: after an F a B must still fit
        self.done = [[0 for _ in ranks] for _ in range(3)]
        self.ends: list[list[list[float]]] = [[[] for _ in ranks] for _ in range(2)]  # of F's, of B's
        self.clock, self.level, self.waited = ([0.0 for _ in ranks] for _ in range(3))
        self.longest_wait = 0.0
        self.kinds: list[list[int]] = [[] for _ in ranks]

    def run(self) -> _Run:
        self._warm_up()
        for microbatch in range(1, self.number):
            for rank in self._forwards_wanted():
                self._free_memory(rank, F)
                self._fill_wait(rank, self._arrival(F, rank))
                self._append(rank, F)
            for rank in range(self.last, -1, -1):
                self._free_memory(rank, B)
                self._fill_wait(rank, self._arrival(B, rank))
                if rank == 0 and self.done[F][0] == self.number:
                    self._append_ws(0, microbatch)
                self._append(rank, B)
        for rank in range(self.last + 1):
            self._append_ws(rank, self.number)
        return self

    @property
    def max_span(self) -> float:
        return max(end - first for end, first in zip(self.clock, self.problem.fill, strict=True))

    def plan(self) -> Plan:
        return self.problem.numbered(self.kinds)

    def _arrival(self, op: int, rank: int) -> float:
        """When the message for a rank's next F or B is there."""
        kind, messages = kind_of(rank, op), self.problem.messages
        if not messages.senders[kind]:
            return 0.0
        sender = messages.senders[kind][0]  # of B and BW the B: this planner has no BW
        return self.ends[op_of(sender)][stage_of(sender)][self.done[op][rank]] + messages.latency(kind, 1.0)

    def _latency_of_b(self, rank: int) -> float:
        """The latency (ms) of the message that each B of a rank waits for."""
        return self.problem.messages.latency(kind_of(rank, B), 1.0)

    def _append(self, rank: int, op: int) -> None:
        start = self.clock[rank] if op == W else max(self.clock[rank], self._arrival(op, rank))
        if self.done[F][rank]:
            self.waited[rank] += start - self.clock[rank]
            self.longest_wait = max(self.longest_wait, self.waited[rank])
        self.clock[rank] = start + self.time[op][rank]
        self.level[rank] += self.change[op][rank]
        if op != W:
            self.ends[op][rank].append(self.clock[rank])
        self.done[op][rank] += 1
        self.kinds[rank].append(kind_of(rank, op))

    # -- until the first B ------------------------------------------------------------------

    def _warm_up(self) -> None:
        for rank in range(self.last + 1):
            self._append(rank, F)
        for rank, more in enumerate(self._warm_up_sizes()):
            for _ in range(more):
                self._append(rank, F)
        for rank in range(self.last, -1, -1):
            self._append(rank, B)

    def _warm_up_sizes(self) -> list[int]:
        """How many F's each rank runs beyond its first while it waits for the first B."""
        sizes = [0] * (self.last + 1)
        first_b = self.clock[self.last] + self.time[B][self.last]  # end of the first B on the next rank
        for rank in range(self.last - 1, -1, -1):
            arrival = first_b + self._latency_of_b(rank)
            sizes[rank], clock = self._fitting(rank, arrival)
            first_b = max(clock, arrival) + self.time[B][rank]
        for rank in range(1, self.last + 1):  # a rank runs fewer than the rank before it, unless that has all
            before = sizes[rank - 1]
            sizes[rank] = min(sizes[rank], before if 1 + before == self.number else max(before - 1, 0))
        return sizes

    def _fitting(self, rank: int, arrival: float) -> tuple[int, float]:
        """How many more F's a rank runs before its first B arrives, and when the last of them ends."""
        clock, level, taken = self.clock[rank], self.level[rank], 0
        while 1 + taken < self.number and level + self.change[F][rank] <= self.most[F][rank]:
            too_late = clock >= arrival if self.early else clock + self.time[F][rank] > arrival
            if too_late:
                break
            clock, level, taken = clock + self.time[F][rank], level + self.change[F][rank], taken + 1
        return taken, clock

    # -- one microbatch further -------------------------------------------------------------

    def _forwards_wanted(self) -> list[int]:
        """The ranks that run an F before their next B: if a rank does, so do all ranks after it."""
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
        next_b = self.clock[after] + self.time[F][after] + self.time[B][after] + self._latency_of_b(rank)
        if self.clock[rank] >= next_b:
            return False
        if self.clock[rank] + self._time_of_forward(rank) <= next_b:
            return True
        return next_b - self.clock[rank] > self.longest_wait - self.waited[rank]

    def _time_of_forward(self, rank: int) -> float:
        """The time of an F and of the W's that must free memory for it."""
        time, level = self.time[F][rank], self.level[rank] + self.change[F][rank]
        for _ in range(self.done[B][rank] - self.done[W][rank]):
            if level <= self.most[F][rank]:
                break
            time, level = time + self.time[W][rank], level + self.change[W][rank]
        return time

    def _free_memory(self, rank: int, op: int) -> None:
        while self.level[rank] + self.change[op][rank] > self.most[op][rank]:
            self._append(rank, W)

    def _fill_wait(self, rank: int, arrival: float) -> None:
        """Run W's while a rank waits: all that fit, then one more that delays the next action a little."""
        while self._has_w(rank) and self.clock[rank] + self.time[W][rank] <= arrival:
            self._append(rank, W)
        wait = arrival - self.clock[rank]
        if self._has_w(rank) and wait > 0:
            costs_nothing = wait <= self.longest_wait - self.waited[rank]  # another rank waits longer
            if not (costs_nothing and self.lazy):
                self._append(rank, W)

    def _has_w(self, rank: int) -> bool:
        return self.done[W][rank] < self.done[B][rank]

    def _append_ws(self, rank: int, number: int) -> None:
        """Run the rank's W's up to this number."""
        while self.done[W][rank] < number:
            self._append(rank, W)

"""A plan as a graph: an action waits for the action before it on its rank and for its message."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from zbpp.planning.problem import Plan, Problem
from zbpp.schedule.dataflow_arrays import op_of
from zbpp.schedule.timetable import Integers, Op, PlanError, units_in_order

F, B, W, BW = map(int, Op)


class Paths(NamedTuple):
    """The longest paths in one direction of time. Lists by action.

    from_start: `neighbour` is the action before it on its rank, `partner` the sender of its message.
    to_end: `neighbour` is the action after it on its rank, `partner` the receiver of its message.
    latency: of that message. length: of the longest path, the action included.
    """

    length: list[float]
    neighbour: list[int]
    partner: list[int]
    latency: list[float]


class PlanGraph:
    """The plan as linked actions.

    The search spends its time in passes over these numbers, so they are plain lists, by action id:

        duration, memory, rank_of    what the problem says about the action; the duration is that in the plan
                                     as it was given, and no move changes it
        index                        its place in its row, -1 if the plan does not contain it
        from_start, to_end           its links and its longest paths (`Paths`)
        backward, weight             of an F: its B or BW, its W or BW

    Id `none` stands for "no such action", and `none + 1 + rank` for the end of a rank's row: this takes
    no time, and its path to the end is minus the rank's offset.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        """Raises PlanError if the plan can't run."""
        self.problem, self.rows = problem, [list(row) for row in plan]
        number = problem.num_units
        self.none = none = len(problem.duration)
        size = none + 1 + problem.num_ranks
        self.duration = [*problem.times_in(plan), *[0.0] * (size - none)]
        self.memory = problem.memory
        self.rank_of_action = [rank for rank in problem.rank_of for _ in range(len(Op) * number)] + [-1]
        self.index = [-1] * size
        self.from_start, self.to_end = (
            Paths([0.0] * size, [none] * size, [none] * size, [0.0] * size) for _ in range(2)
        )
        self.to_end.length[none] = -math.inf
        for rank, offset in enumerate(problem.offsets):
            self.to_end.length[none + 1 + rank] = -offset
        self.backward, self.weight = [none] * none, [none] * none
        # Per op, what has an order together with it: BW counts as B and as W.
        self.ordered = ([list(range(none))], [self.backward], [self.weight], [self.backward, self.weight])
        numbers = np.arange(number, dtype=np.int32)
        self.neighbours = [
            _neighbours(units_in_order(op, numbers, problem.num_slices)) for op in (F, B, W, BW)
        ]
        self.levels: list[list[float]] = [[] for _ in plan]  # memory after each action of a row
        self.order = self._link()

    def _link(self) -> list[int]:
        """Link all actions, and return them in an order in which they can run.

        Raises PlanError if there is none.
        """
        for rank in range(len(self.rows)):
            self._link_row(rank)
        for row in self.rows:
            self._link_messages(row)
            self._note_backwards(row)
        return self._topological()

    def _link_row(self, rank: int) -> None:
        """Neighbours, indices and memory levels along one row."""
        row = self.rows[rank]
        for index, a in enumerate(row):
            self.index[a] = index
        self._link_neighbours(self.none, row, self.none + 1 + rank)
        self.levels[rank] = list(accumulate([self.memory[a] for a in row]))

    def _link_neighbours(self, previous: int, segment: list[int], following: int) -> None:
        before, after = self.from_start.neighbour, self.to_end.neighbour
        for a in segment:
            before[a], after[previous] = previous, a
            previous = a
        after[previous], before[following] = following, previous

    def _link_messages(self, actions: Iterable[int]) -> None:
        """Connect each action with the sender of its message: B or BW, whichever the plan contains."""
        number, index = self.problem.num_units, self.index
        senders, latency = self.problem.messages.senders, self.problem.latency
        for a in actions:
            kind = a // number
            for sending in senders[kind]:
                sender = a + (sending - kind) * number
                if index[sender] >= 0:
                    self.from_start.partner[a], self.to_end.partner[sender] = sender, a
                    self.from_start.latency[a] = self.to_end.latency[sender] = latency(a)

    def _note_backwards(self, actions: Iterable[int]) -> None:
        number = self.problem.num_units
        for a in actions:
            op = op_of(a // number)
            if op in (B, BW):
                self.backward[a - op * number] = a
            if op in (W, BW):
                self.weight[a - op * number] = a

    def _topological(self) -> list[int]:
        """Let each rank run until it waits for a message; whoever sends it wakes the rank."""
        order: list[int] = []
        sender = self.from_start.partner
        done = [False] * self.none + [True]
        reached = [0] * len(self.rows)
        waiting: dict[int, int] = {}
        awake = list(range(len(self.rows)))
        while awake:
            rank = awake.pop()
            row = self.rows[rank]
            while reached[rank] < len(row):
                a = row[reached[rank]]
                if not done[sender[a]]:
                    waiting[sender[a]] = rank
                    break
                done[a] = True
                order.append(a)
                reached[rank] += 1
                if a in waiting:
                    awake.append(waiting.pop(a))
        if waiting:
            raise PlanError("the plan can't proceed")
        return order

    def feasible_range(self, a: int) -> tuple[int, int]:
        """The first and the last index in its row that an action may take, by what its own rank knows.

        Units keep the order of their op; F, B, W of one unit stay in order; so do the two ends of a message
        that stays on the rank. (A move may still be impossible by way of other ranks.)
        """
        number, index, rank = self.problem.num_units, self.index, self.rank_of_action[a]
        kind, unit = divmod(a, number)
        op = op_of(kind)
        f = a - op * number
        earlier, later = [], []
        if op != F:
            earlier.append(f if op != W else self.backward[f])
        if op in (F, B):
            later.append(self.backward[f] if op == F else self.weight[f])
        before, after = self.neighbours[op]
        for of_forward in self.ordered[op]:
            if before[unit] >= 0:
                earlier.append(of_forward[f - unit + before[unit]])
            if after[unit] >= 0:
                later.append(of_forward[f - unit + after[unit]])
        sender, receiver = self.from_start.partner[a], self.to_end.partner[a]
        if self.rank_of_action[sender] == rank:
            earlier.append(sender)
        if self.rank_of_action[receiver] == rank:
            later.append(receiver)
        low = max([index[b] for b in earlier], default=-1) + 1
        return low, min([index[b] for b in later], default=len(self.rows[rank])) - 1


def _neighbours(units: Integers) -> tuple[list[int], list[int]]:
    """(the unit before each unit, the unit after it) in this order of all units; -1 at the ends."""
    before, after = [-1] * len(units), [-1] * len(units)
    for one, other in pairwise(units.tolist()):
        after[one], before[other] = other, one
    return before, after

"""W's put into a given order of F's and B's while it runs: where a rank would wait, or needs room."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from zbpp.planning.problem import Plan, Problem
from zbpp.schedule.timetable import Op

F, B, W, BW = map(int, Op)


def weave(problem: Problem, orders: list[list[int]], eagerness: float) -> tuple[float, Plan]:
    """F's and B's (as ids) in the order given per rank, W's added: objective and plan.

    A rank whose next action has no room runs a W. A rank that must wait runs one if the wait is at
    least `eagerness` times as long: at 0 no wait is left idle, at 1 no W delays anything. While the
    sender has not started, the wait is at least its time and the message's.
    The objective is inf if the order can't run, or not within memory.
    """
    loom = _Loom(problem, orders, eagerness)
    return loom.run(), loom.plan


class _Loom:
    """Events in order of time: a rank is free, or what it waits for arrives."""

    def __init__(self, problem: Problem, orders: list[list[int]], eagerness: float) -> None:
        self.problem, self.orders, self.eagerness = problem, orders, eagerness
        self.number = problem.num_microbatches
        ranks = range(problem.num_ranks)
        self.plan: Plan = [[] for _ in ranks]
        self.reached = [0 for _ in ranks]
        self.level = [0.0 for _ in ranks]
        self.free = [0.0 for _ in ranks]
        self.pending: list[list[int]] = [[] for _ in ranks]  # W's, the oldest last
        self.arrival: dict[int, float] = {}
        self.waiting: dict[int, int] = {}
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in ranks]

    def run(self) -> float:
        while self.events:
            self._step(*heappop(self.events))
        if any(at < len(row) for at, row in zip(self.reached, self.orders, strict=True)) or any(self.pending):
            return math.inf
        return max(end - offset for end, offset in zip(self.free, self.problem.offsets, strict=True))

    def _step(self, now: float, rank: int) -> None:
        order, at = self.orders[rank], self.reached[rank]
        pending = self.pending[rank]
        if at == len(order):
            if pending:
                self._run_w(now, rank)
            return
        action = order[at]
        kind = action // self.number
        if self.level[rank] + self.problem.memory[kind] > self.problem.ceilings[rank]:
            if pending:
                self._run_w(now, rank)
            return  # with nothing to free, the plan ends here
        arrival = self._arrival(action, kind)
        if arrival <= now:
            self._run(now, rank, action, kind)
        elif pending and self._gap(now, arrival, kind) >= self.eagerness * self._next_w(rank):
            self._run_w(now, rank)
        elif arrival < math.inf:
            heappush(self.events, (arrival, rank))
        else:
            self.waiting[action] = rank

    def _arrival(self, action: int, kind: int) -> float:
        """When an action's message is there; inf while its sender hasn't started."""
        if kind == F or (kind & 3 and kind >> 2 == self.problem.num_stages - 1):
            return 0.0  # no message; the last stage's F stands before its B
        return self.arrival.get(action, math.inf)

    def _gap(self, now: float, arrival: float, kind: int) -> float:
        if arrival < math.inf:
            return arrival - now
        stage, problem = kind >> 2, self.problem
        if kind & 3 == F:
            return problem.duration[kind - 4] + problem.latency[stage - 1]
        return problem.duration[(stage + 1) * 4 + B] + problem.backward_latency[stage]

    def _next_w(self, rank: int) -> float:
        return self.problem.duration[self.pending[rank][-1] // self.number]

    def _run(self, now: float, rank: int, action: int, kind: int) -> None:
        number, problem, stage = self.number, self.problem, kind >> 2
        end = self._append(now, rank, action, kind)
        self.reached[rank] += 1
        if kind & 3 == F:
            if stage < problem.num_stages - 1:
                self._send(now, action + 4 * number, end + problem.latency[stage])
            return
        if stage:
            self._send(now, action - 4 * number, end + problem.backward_latency[stage - 1])
        self.pending[rank].insert(0, action + number)

    def _run_w(self, now: float, rank: int) -> None:
        action = self.pending[rank].pop()
        self._append(now, rank, action, action // self.number)

    def _append(self, now: float, rank: int, action: int, kind: int) -> float:
        end = now + self.problem.duration[kind]
        self.level[rank] += self.problem.memory[kind]
        self.plan[rank].append(action)
        self.free[rank] = end
        heappush(self.events, (end, rank))
        return end

    def _send(self, now: float, target: int, arrival: float) -> None:
        """From the sender's start on the arrival is known: who waits for it may choose again."""
        self.arrival[target] = arrival
        if target in self.waiting:
            heappush(self.events, (now, self.waiting.pop(target)))

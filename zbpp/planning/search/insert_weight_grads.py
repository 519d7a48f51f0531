"""Insert W's into a given order of F's and B's, event by event: into waits, and to free memory."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from zbpp.planning.problem import Plan, Problem
from zbpp.schedule.dataflow_arrays import op_of
from zbpp.schedule.timetable import Op

F, B, W, BW = map(int, Op)


def insert_weight_grads(problem: Problem, orders: list[list[int]], least_wait: float) -> tuple[float, Plan]:
    """F's and B's (as ids) in the order given per rank, W's added: objective and plan.

    A rank without memory for its next action runs a W. A rank that must wait runs a W if the wait is
    at least `least_wait` times as long as the W: with 0 no wait stays idle while there is a W, with
    1 no W delays anything. While the sender of a message has not started, the wait is estimated
    as the sender's duration plus the message's. The objective is inf if the order can't run, or not
    within memory.
    """
    insertion = _Insertion(problem, orders, least_wait)
    return insertion.run(), insertion.plan


class _Insertion:
    """Events in order of time: a rank is free, or the message that a rank waits for arrives."""

    def __init__(self, problem: Problem, orders: list[list[int]], least_wait: float) -> None:
        self.problem, self.orders, self.least_wait = problem, orders, least_wait
        self.number = problem.num_microbatches
        messages = problem.messages
        # A gradient may come from a B or a BW, and go to either. Orders hold B's only; B stands first here.
        self.sender, self.receiver = (
            [kinds[0] if kinds else None for kinds in each] for each in (messages.senders, messages.receivers)
        )
        self.latency = messages.latency
        ranks = range(problem.num_ranks)
        self.plan: Plan = [[] for _ in ranks]
        self.reached = [0 for _ in ranks]  # place in the order
        self.level = [0.0 for _ in ranks]  # of memory
        self.free = [0.0 for _ in ranks]  # end of the last action
        self.pending: list[list[int]] = [[] for _ in ranks]  # W's, the oldest last
        self.arrival: dict[int, float] = {}  # of the message for an action, if its sender has started
        self.waiting: dict[int, int] = {}  # action whose sender has not started -> its rank
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in ranks]

    def run(self) -> float:
        while self.events:
            self._step(*heappop(self.events))
        if any(at < len(row) for at, row in zip(self.reached, self.orders, strict=True)) or any(self.pending):
            return math.inf
        return max(end - offset for end, offset in zip(self.free, self.problem.offsets, strict=True))

    def _step(self, now: float, rank: int) -> None:
        """A rank may choose its next action."""
        order, at, pending = self.orders[rank], self.reached[rank], self.pending[rank]
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
        arrival = 0.0 if self.sender[kind] is None else self.arrival.get(action, math.inf)
        if arrival <= now:
            self._run_next(now, rank, action, kind)
        elif pending and self._wait(now, arrival, kind) >= self.least_wait * self._next_w(rank):
            self._run_w(now, rank)
        elif arrival < math.inf:
            heappush(self.events, (arrival, rank))
        else:
            self.waiting[action] = rank

    def _wait(self, now: float, arrival: float, kind: int) -> float:
        """How long the message for a kind is still on its way, at least."""
        if arrival < math.inf:
            return arrival - now
        sender = self.sender[kind]
        return self.latency[kind] + (0.0 if sender is None else self.problem.duration[sender])

    def _next_w(self, rank: int) -> float:
        return self.problem.duration[self.pending[rank][-1] // self.number]

    def _run_next(self, now: float, rank: int, action: int, kind: int) -> None:
        self._run(now, rank, action, kind)
        self.reached[rank] += 1
        if op_of(kind) == B:
            self.pending[rank].insert(0, action + (W - B) * self.number)

    def _run_w(self, now: float, rank: int) -> None:
        action = self.pending[rank].pop()
        self._run(now, rank, action, action // self.number)

    def _run(self, now: float, rank: int, action: int, kind: int) -> None:
        self.free[rank] = end = now + self.problem.duration[kind]
        self.level[rank] += self.problem.memory[kind]
        self.plan[rank].append(action)
        heappush(self.events, (end, rank))
        receiver = self.receiver[kind]
        if receiver is not None:
            self._send(now, action + (receiver - kind) * self.number, end + self.latency[receiver])

    def _send(self, now: float, target: int, arrival: float) -> None:
        """Note when a message will arrive, as its sender starts; a rank that waits for it chooses again."""
        self.arrival[target] = arrival
        if target in self.waiting:
            heappush(self.events, (now, self.waiting.pop(target)))

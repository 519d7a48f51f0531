"""List scheduling that aims at a target, for one stage per rank: each rank is allowed to wait.

A greedy planner never waits while it has a W to run, and so delays an F or a B that is about to
arrive, and with it every rank after. But a rank that is to finish at a target X has time to spare:
X less its work, less the waiting time at its end that no plan avoids. Here a rank may spend this time
where waiting pays. Only when it is used up, the rank must run whatever it has.

With an F and a B both there, a rank runs the F, as long as fewer than 2(p - rank) - 1 microbatches are
in flight: then F's and B's meet halfway. An F for which there is no memory lets a W run first. Where a
BW can pay, it runs instead of a B when no W is left over. How long ranks wait is set by `PriorityRules`;
none are best everywhere (evolve.py tries many).
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from math import inf
from typing import NamedTuple

from zbpp.planning.problem import Problem
from zbpp.schedule.dataflow_arrays import kind_of, op_of, stage_of
from zbpp.schedule.timetable import Op

F, B, W, BW = map(int, Op)
_WAIT = -1


class PriorityRules(NamedTuple):
    """How long ranks wait instead of running an F or a W that is there.

    patience: a rank that could run an F, but no B, waits for a B that arrives in less than this many times
    the F's duration.
    idle_shares: per rank, how much of its spare time it may wait in all.
    """

    patience: float
    idle_shares: list[float]


def list_schedule(
    problem: Problem, spare_times: list[float], rules: PriorityRules
) -> tuple[float, list[list[int]]]:
    """One run: its objective (inf if it got stuck), and per rank the kinds in order.

    spare_times: per rank, how long it may wait if it is to meet the target (ms).
    """
    most_idle = [share * time for share, time in zip(rules.idle_shares, spare_times, strict=True)]
    ranks = [_Rank(problem, index, rules.patience, most) for index, most in enumerate(most_idle)]
    _connect(problem, ranks)
    events = [(0.0, index) for index in range(problem.num_ranks)]
    while events:
        now, index = events[0]
        rank = ranks[index]
        op = rank.choose(now)
        if op != _WAIT:
            receiver = rank.run(op, now)
            heapreplace(events, (rank.free, index))
            if receiver and receiver.asleep:
                receiver.asleep = False
                heappush(events, (now, receiver.index))
        elif rank.wake < inf:
            heapreplace(events, (rank.wake, index))
        else:
            heappop(events)
            rank.asleep = True
    complete = all(rank.num_w == problem.num_microbatches for rank in ranks)
    value = max(rank.free - offset for rank, offset in zip(ranks, problem.offsets, strict=True))
    return value if complete else inf, [[kind_of(rank.index, op) for op in rank.ops] for rank in ranks]


class _Rank:
    """One rank while the plan is made: its costs, its waits, and what it has done so far.

    A search calls its methods a million times: hence slots, few calls, and ceilings subtracted beforehand.
    """

    __slots__ = (
        *("index", "time", "memory", "most_before_f", "most_before_b"),
        *("cap", "fuse", "least_wait", "most_idle"),
        *("for_f", "for_b", "outlets"),
        *("num_f", "num_b", "num_w", "level", "free", "idle", "wake", "asleep", "ops"),
    )

    def __init__(self, problem: Problem, index: int, patience: float, most_idle: float) -> None:
        self.index = index
        self.time = [problem.stage_costs.duration[op][index] for op in Op]
        self.memory = [problem.stage_costs.memory[op][index] for op in Op]
        self.most_before_f = problem.ceilings[index] - self.memory[F]  # of the memory level
        self.most_before_b = problem.ceilings[index] - self.memory[B]
        self.cap = 2 * (problem.num_ranks - index) - 1  # of microbatches in flight
        self.fuse = problem.whole_pays[index]
        self.least_wait, self.most_idle = patience * self.time[F], most_idle
        self.for_f: list[float] = []  # when the messages for F's arrive
        self.for_b: list[float] = []  # when the messages for B's and BW's arrive
        self.outlets: list[tuple[_Rank, list[float], float] | None] = [None] * len(Op)
        self.num_f = self.num_b = self.num_w = 0
        self.level = self.free = self.idle = self.wake = 0.0
        self.asleep = False
        self.ops: list[int] = []

    def choose(self, now: float) -> int:
        """The op to run now, or _WAIT: then `wake` is when to choose again (inf: once a message is sent)."""
        for_f, for_b, num_f, num_b = self.for_f, self.for_b, self.num_f, self.num_b
        next_f = for_f[num_f] if num_f < len(for_f) else inf
        next_b = for_b[num_b] if num_b < len(for_b) else inf
        fits, has_w = self.level <= self.most_before_f, self.num_w < num_b
        if next_b <= now:
            if next_f <= now and num_f - num_b < self.cap and (fits or has_w):
                return F if fits else W
            if not has_w and (self.fuse or self.level > self.most_before_b):
                return BW
            return B if self.level <= self.most_before_b else W
        wait_ends = self.free - self.idle + self.most_idle  # by then the rank has used up its spare time
        if next_f <= now and fits:
            self.wake = next_b
            return F if next_b - now >= self.least_wait or next_b > wait_ends else _WAIT
        self.wake = wake = next_f if fits and next_f < next_b else next_b
        if has_w and (next_f <= now or wake - now >= self.time[W] or wake > wait_ends):
            return W
        return _WAIT

    def run(self, op: int, now: float) -> _Rank | None:
        """Run an op; return the rank that gets its result."""
        if self.num_f:
            self.idle += now - self.free
        self.free = end = now + self.time[op]
        self.level += self.memory[op]
        self.ops.append(op)
        if op == F:
            self.num_f += 1
        elif op == W:
            self.num_w += 1
        else:
            self.num_b += 1
            self.num_w += 1 if op == BW else 0
        outlet = self.outlets[op]
        if outlet is None:
            return None
        receiver, arrivals, latency = outlet
        arrivals.append(end + latency)
        return receiver


def _connect(problem: Problem, ranks: list[_Rank]) -> None:
    """Give each op its outlet: the rank that gets its result, the arrival times there, and the latency.

    Stage r is on rank r, and the results of an op all go to one rank.
    """
    messages = problem.messages
    for rank in ranks:
        for op in Op:
            receivers = messages.receivers[kind_of(rank.index, op)]
            if receivers:
                receiver = ranks[stage_of(receivers[0])]
                arrivals = receiver.for_f if op_of(receivers[0]) == F else receiver.for_b
                rank.outlets[op] = receiver, arrivals, messages.latency[receivers[0]]
        if not messages.senders[kind_of(rank.index, F)]:
            rank.for_f.extend([0.0] * problem.num_microbatches)
        if not messages.senders[kind_of(rank.index, B)]:  # the last stage: its own F's let its B's start
            rank.outlets[F] = rank, rank.for_b, 0.0

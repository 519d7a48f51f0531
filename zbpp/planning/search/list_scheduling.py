"""List scheduling that aims at a target, for one stage per rank: each rank is allowed to wait.

A greedy planner never waits while it has a W to run, and so delays an F or a B that is about to
arrive, and with it every rank after. But a rank that is to finish at a target X has time to spare:
X less its work, less the waiting time at its end that no plan avoids. Here a rank may spend this time
where waiting pays. Only when it is used up, the rank must run whatever it has.

A `PriorityRule` says what a rank prefers. No rule is best everywhere, so many are tried (evolve.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from zbpp.planning.problem import Problem
from zbpp.schedule.dataflow_arrays import kind_of, op_of, stage_of
from zbpp.schedule.timetable import Op

F, B, W, BW = map(int, Op)
_WAIT = -1


@dataclass(frozen=True)
class PriorityRule:
    """What one rank does when there is a choice.

    forward_first: with an F and a B both there, take the F, if fewer than `cap` microbatches are in flight.
    cap: see there; strict_cap: at the cap, take no F even if only an F is there.
    free_memory: with an F there and no memory for it, run a W at once, even if a B is there, or soon will be.
    patience: with only an F there, wait for a B that arrives within this many times the F's duration.
    idle_share: how much of its spare time the rank may wait.
    fuse: with no W left over, run a BW instead of a B.
    """

    forward_first: bool
    cap: int
    strict_cap: bool
    free_memory: bool
    patience: float
    idle_share: float
    fuse: bool


class Settings(NamedTuple):
    """Per rank, its rule for the F's before `late_from`, and its rule from that F on."""

    early: list[PriorityRule]
    late: list[PriorityRule]
    late_from: list[int]


def list_schedule(
    problem: Problem, spare_time: list[float], settings: Settings
) -> tuple[float, list[list[int]]]:
    """One run: its objective (inf if it got stuck), and per rank the kinds in order.

    spare_time: per rank, how long it may wait if it is to meet the target (ms).
    """
    ranks = [_Rank(problem, index, spare_time[index], settings) for index in range(problem.num_ranks)]
    _connect(problem, ranks)
    events = [(0.0, index) for index in range(problem.num_ranks)]
    while events:
        now, index = heappop(events)
        rank = ranks[index]
        op = rank.choose(now)
        if op != _WAIT:
            receiver = rank.run(op, now)
            heappush(events, (rank.free, index))
            if receiver and receiver.asleep:
                receiver.asleep = False
                heappush(events, (now, receiver.index))
        elif rank.wake < inf:
            heappush(events, (rank.wake, index))
        else:
            rank.asleep = True
    complete = all(rank.num_w == problem.num_microbatches for rank in ranks)
    value = max(rank.free - offset for rank, offset in zip(ranks, problem.offsets, strict=True))
    return value if complete else inf, [[kind_of(rank.index, op) for op in rank.ops] for rank in ranks]


class _Rank:
    """One rank while the plan is made: its costs, its rules, and what it has done so far.

    Its methods run once per action and a thousand times per search: hence slots, and few calls.
    """

    __slots__ = (
        *("index", "time", "memory", "most_before_f", "most_before_b", "for_f", "for_b", "outlets"),
        *("rule", "late_rule", "late_from", "least_wait", "most_idle", "spare_time"),
        *("num_f", "num_b", "num_w", "level", "free", "idle", "wake", "asleep", "ops"),
    )

    def __init__(self, problem: Problem, index: int, spare_time: float, settings: Settings) -> None:
        self.index, self.spare_time = index, spare_time
        self.time = [problem.stage_costs.duration[op][index] for op in Op]
        self.memory = [problem.stage_costs.memory[op][index] for op in Op]
        self.most_before_f = problem.ceilings[index] - self.memory[F]
        self.most_before_b = problem.ceilings[index] - self.memory[B]
        self.for_f: list[float] = []  # when messages for F's, and
        self.for_b: list[float] = []  # for B's and BW's arrive
        self.outlets: list[tuple[_Rank, list[float], float] | None] = [None] * len(Op)
        self.late_rule, self.late_from = settings.late[index], settings.late_from[index]
        self.num_f = self.num_b = self.num_w = 0
        self.level = self.free = self.idle = self.wake = 0.0
        self.asleep = False
        self.ops: list[int] = []
        self._follow(settings.late[index] if self.late_from == 0 else settings.early[index])

    def _follow(self, rule: PriorityRule) -> None:
        self.rule = rule
        self.least_wait = rule.patience * self.time[F]
        self.most_idle = rule.idle_share * self.spare_time

    def choose(self, now: float) -> int:
        """The op to run now; or _WAIT, and `wake` is when to choose again (inf: when a message is sent)."""
        for_f, for_b, num_f, num_b, rule = self.for_f, self.for_b, self.num_f, self.num_b, self.rule
        next_f = for_f[num_f] if num_f < len(for_f) else inf
        next_b = for_b[num_b] if num_b < len(for_b) else inf
        fits = self.level <= self.most_before_f
        below_cap = num_f - num_b < rule.cap
        has_w = self.num_w < num_b
        if next_b <= now:
            if next_f <= now and rule.forward_first and below_cap:
                if fits:
                    return F
                if rule.free_memory and has_w:
                    return W
            if rule.fuse and not has_w:
                return BW
            if self.level > self.most_before_b:
                return W if has_w else BW
            return B
        may_run_f = fits and (below_cap or not rule.strict_cap)
        most = self.most_idle - self.idle + self.free  # the rank may wait until then
        if next_f <= now and may_run_f:
            self.wake = next_b
            return F if next_b - now >= self.least_wait or next_b > most else _WAIT
        self.wake = wake = next_f if may_run_f and next_f < next_b else next_b
        if has_w and (
            wake - now >= self.time[W] or wake > most or (rule.free_memory and not fits and next_f <= now)
        ):
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
            if self.num_f == self.late_from:
                self._follow(self.late_rule)
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
    """Give each op its outlet: the rank that gets its result, its arrival times there, and the latency.

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

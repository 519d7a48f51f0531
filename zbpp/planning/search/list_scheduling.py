"""List scheduling that aims at a target, for one stage per rank: each rank is allowed to wait.

A greedy planner never waits while it has a W to run, and so delays an F or a B that is about to
arrive, and with it every rank after. But a rank that is to finish at a target X has time to spare:
X less its work, less the waiting time at its end that no plan avoids. Here a rank may spend this time
where waiting pays. Only when it is used up, the rank must run whatever it has.

With an F and a B both there, a rank runs the F, as long as fewer than 2(p - rank) - 1 + S - 1 units (of S
slices a microbatch) are in flight: then F's and B's meet halfway. An F for which there is no memory lets a W
run first. A BW runs where there is no memory for a B and no W is left over. How long ranks wait is set by
`PriorityRules`. No rules are best everywhere: a `Population` of them is mutated and selected.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from zbpp.planning.dependencies import earliest_starts
from zbpp.planning.problem import Problem
from zbpp.planning.search.deadline import Deadline
from zbpp.schedule.dataflow_arrays import kind_of, op_of, stage_of
from zbpp.schedule.timetable import Op, units_in_order

F, B, W, BW = map(int, Op)
_WAIT = -1


class PriorityRules(NamedTuple):
    """How long ranks wait instead of running an F or a W that is there.

    patience: a rank that could run an F, but no B, waits for a B that arrives in less than this many times
    the F's duration.
    idle_shares: per rank, how much of its spare time it may wait in all.
    ahead: for how much of the time that messages take from a rank to the last one and back the rank runs
    ahead with F's. Without links, 0.
    """

    patience: float
    idle_shares: list[float]
    ahead: float = 0.0


def list_schedule(
    problem: Problem, spare_times: list[float], rules: PriorityRules
) -> tuple[float, list[list[int]]]:
    """One run: its objective (inf if it got stuck), and per rank the kinds in order.

    spare_times: per rank, how long it may wait if it is to meet the target (ms).
    """
    most_idle = [share * time for share, time in zip(rules.idle_shares, spare_times, strict=True)]
    ranks = [_Rank(problem, index, rules, most) for index, most in enumerate(most_idle)]
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
        elif rank.wake < math.inf:
            heapreplace(events, (rank.wake, index))
        else:
            heappop(events)
            rank.asleep = True
    complete = all(rank.num_w == problem.num_units for rank in ranks)
    value = max(rank.free - offset for rank, offset in zip(ranks, problem.offsets, strict=True))
    return value if complete else math.inf, [[kind_of(rank.index, op) for op in rank.ops] for rank in ranks]


class _Rank:
    """One rank while the plan is made: its costs, its waits, and what it has done so far.

    A search calls its methods a million times: hence slots, few calls, and ceilings subtracted beforehand.
    """

    __slots__ = (
        *("index", "time", "memory", "most_before_f", "most_before_b"),
        *("cap", "patience", "most_idle"),
        *("for_f", "for_b", "outlets", "occupied"),
        *("num_f", "num_b", "num_w", "level", "free", "idle", "wake", "asleep", "ops"),
    )

    def __init__(self, problem: Problem, index: int, rules: PriorityRules, most_idle: float) -> None:
        self.index = index
        own = [[kind_of(index, op) * problem.num_units + unit for unit in _units(problem, op)] for op in Op]
        # By op and number: the number of an F, a B or a W among those of the rank; and so below.
        self.time = [[problem.duration[a] for a in ids] for ids in own]
        self.memory = [[problem.memory[a] for a in ids] for ids in own]
        ceiling = problem.ceilings[index]
        self.most_before_f = [ceiling - change for change in self.memory[F]]  # of the memory level
        self.most_before_b = [ceiling - change for change in self.memory[B]]
        self.cap = 2 * (problem.num_ranks - index) - 1 + problem.num_slices - 1  # of units in flight
        if rules.ahead:
            self.cap += math.ceil(rules.ahead * _round_trip(problem, index))
        self.patience, self.most_idle = rules.patience, most_idle
        self.for_f: list[float] = []  # when the messages for F's arrive
        self.for_b: list[float] = []  # when the messages for B's and BW's arrive
        self.outlets: list[_Outlet | None] = [None] * len(Op)
        self.occupied = [0.0, 0.0]  # until when the link to the rank before is, and that to the rank after
        self.num_f = self.num_b = self.num_w = 0
        self.level = self.free = self.idle = self.wake = 0.0
        self.asleep = False
        self.ops: list[int] = []

    def choose(self, now: float) -> int:
        """The op to run now, or _WAIT: then `wake` is when to choose again (inf: once a message is sent)."""
        for_f, for_b, num_f, num_b = self.for_f, self.for_b, self.num_f, self.num_b
        next_f = for_f[num_f] if num_f < len(for_f) else math.inf
        next_b = for_b[num_b] if num_b < len(for_b) else math.inf
        has_w = self.num_w < num_b
        fits = num_f < len(self.most_before_f) and self.level <= self.most_before_f[num_f]
        if next_b <= now:
            if next_f <= now and num_f - num_b < self.cap and (fits or has_w):
                return F if fits else W
            if self.level <= self.most_before_b[num_b]:
                return B
            return W if has_w else BW
        wait_ends = self.free - self.idle + self.most_idle  # by then the rank has used up its spare time
        if next_f <= now and fits:
            self.wake = next_b
            least_wait = self.patience * self.time[F][num_f]
            return F if next_b - now >= least_wait or next_b > wait_ends else _WAIT
        self.wake = wake = next_f if fits and next_f < next_b else next_b
        if has_w and (next_f <= now or wake - now >= self.time[W][self.num_w] or wake > wait_ends):
            return W
        return _WAIT

    def run(self, op: int, now: float) -> _Rank | None:
        """Run an op; return the rank that gets its result."""
        if self.num_f:
            self.idle += now - self.free
        number = self.num_f if op == F else self.num_w if op == W else self.num_b
        self.free = end = now + self.time[op][number]
        self.level += self.memory[op][number]
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
        if outlet.busy:
            is_down = op == F
            begins = max(end, self.occupied[is_down])
            self.occupied[is_down] = end = begins + outlet.busy[number]
        outlet.arrivals.append(end + outlet.latencies[number])
        return outlet.receiver


class _Outlet(NamedTuple):
    """Where the results of an op go: the rank, and the arrival times there.

    latencies: by the number of the action, how long its message takes (ms). busy: how long it occupies the
    link before that; [] where it does not.
    """

    receiver: _Rank
    arrivals: list[float] | _LastSlices
    latencies: list[float]
    busy: list[float]


class _LastSlices:
    """Arrivals at the last stage: F of a microbatch's last slice lets the B's of all its slices start."""

    def __init__(self, arrivals: list[float], num_slices: int) -> None:
        self.arrivals, self.num_slices, self.num_f = arrivals, num_slices, 0

    def append(self, arrival: float) -> None:
        self.num_f += 1
        if self.num_f % self.num_slices == 0:
            self.arrivals += [arrival] * self.num_slices


def _units(problem: Problem, op: int) -> list[int]:
    """The units of a stage's F's, B's or W's, in order."""
    ascending = np.arange(problem.num_units, dtype=np.int32)
    units: list[int] = units_in_order(op, ascending, problem.num_slices).tolist()
    return units


def _connect(problem: Problem, ranks: list[_Rank]) -> None:
    """Give each op its outlet: the rank that gets its result, the arrival times there, and the latencies.

    Stage r is on rank r, and the results of an op all go to one rank.
    """
    messages, num_slices = problem.messages, problem.num_slices
    lengths = [[problem.length(unit) for unit in _units(problem, op)] for op in Op]
    for rank in ranks:
        for op in Op:
            receivers = messages.receivers[kind_of(rank.index, op)]
            if receivers:
                receiver = ranks[stage_of(receivers[0])]
                arrivals = receiver.for_f if op_of(receivers[0]) == F else receiver.for_b
                taken = [messages.latency(receivers[0], length) for length in lengths[op]]
                route = problem.stage_costs.routes[kind_of(rank.index, op)] if problem.has_queues else None
                busy = [route.busy * length for length in lengths[op]] if route else []
                latencies = [all_ - own for all_, own in zip(taken, busy, strict=True)] if busy else taken
                rank.outlets[op] = _Outlet(receiver, arrivals, latencies, busy)
        if not messages.senders[kind_of(rank.index, F)]:
            rank.for_f.extend([0.0] * problem.num_units)
        if not messages.senders[kind_of(rank.index, B)]:  # the last stage: its own F's let its B's start
            of_f = rank.for_b if num_slices == 1 else _LastSlices(rank.for_b, num_slices)
            rank.outlets[F] = _Outlet(rank, of_f, [0.0] * problem.num_units, [])


def _round_trip(problem: Problem, rank: int) -> float:
    """How long messages take from a rank to the last one and back, in microbatches' work."""
    last = problem.num_stages - 1
    trip = sum(
        problem.first_message(stage, stage + 1) + problem.first_message(stage + 1, stage)
        for stage in range(rank, last)
    )
    return trip / max(problem.work_of(each) / problem.num_units for each in range(problem.num_ranks))


_AHEAD = (0.0, 0.5, 1.0, 1.5)
_PATIENCE = (0.0, 0.1, 0.3, 0.6, 1.0)
_IDLE_SHARE = (0.0, 0.3, 0.6, 0.8, 1.0, 1.2, 2.0)
_POPULATION = 8
_MOST_EQUAL = 3  # candidates of one objective: they are mostly the same plan


class Candidate(NamedTuple):
    """Rules, the objective of the plan that they give, and per rank the kinds of that plan in order."""

    value: float
    born: int
    rules: PriorityRules
    kinds: list[list[int]]


class Population:
    """The best rules so far, best first; of equals the youngest first, so that the population drifts."""

    def __init__(self, problem: Problem, target: float, rng: random.Random) -> None:
        self.problem, self.rng = problem, rng
        self.spare_times = spare_times(problem, target)
        self.candidates: list[Candidate] = []
        self.num_born = 0
        self._first = first_rules(problem)

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def advance(self, num_runs: int, deadline: Deadline, goal: float) -> None:
        """Try rules for so many runs: the fixed ones first, then children."""
        for _ in range(num_runs):
            if deadline.over or (self.candidates and self.best.value <= goal):
                return
            first = next(self._first, None)
            self._try(self._child() if first is None else first)

    def _child(self) -> PriorityRules:
        parent = min(int(self.rng.expovariate(0.5)), len(self.candidates) - 1)
        return _mutated(self.candidates[parent].rules, self.rng)

    def _try(self, rules: PriorityRules) -> None:
        value, kinds = list_schedule(self.problem, self.spare_times, rules)
        self.num_born += 1
        if self.candidates and value == math.inf:
            return
        candidates = self.candidates
        candidates.append(Candidate(value, self.num_born, rules, kinds))
        candidates.sort(key=lambda each: (each.value, -each.born))
        equal = [each for each in candidates if abs(each.value - value) <= self.problem.tolerance]
        if len(equal) > _MOST_EQUAL:
            candidates.remove(equal[-1])
        del candidates[_POPULATION:]


def spare_times(problem: Problem, target: float) -> list[float]:
    """Per rank, how long it may wait and still meet the target (ms).

    That is the target less the rank's start, its work, and the idle time at its end. Microbatches that
    differ count by their mean: the rules say how much of this time is used.
    """
    problem = problem.uniform
    starts = earliest_starts(problem.num_stages, problem.durations_of(0), problem.first_message)
    spare = []
    for rank in range(problem.num_ranks):
        begin = problem.fill[rank] - problem.offsets[rank]
        time_f = problem.unit_costs.duration[Op.F][rank]
        down_and_back = starts[kind_of(rank, Op.B)] - starts[kind_of(rank, Op.F)] - time_f
        idle_tail = max(0.0, down_and_back - _work_in_flight(problem, rank))
        spare.append(max(0.0, target - begin - problem.work_of(rank) - idle_tail))
    return spare


def _work_in_flight(problem: Problem, rank: int) -> float:
    """The most work (ms) that a rank may have left between its last F and its last B, as memory allows.

    When the last F ends, `a` units wait for B. Before the last of their B's the rank can run the other a - 1
    with their W's, and the W's of `x` more units.
    """
    times, memory, number = problem.unit_costs.duration, problem.unit_costs.memory, problem.num_units
    time_b, time_w = times[Op.B][rank], times[Op.W][rank]
    saved, deferred, limit = memory[Op.F][rank], -memory[Op.W][rank], problem.ceilings[rank]
    most = 0.0
    for a in range(1, number + 1):
        if a * saved > limit:
            break
        x = number - a if deferred <= 0 or limit == math.inf else int((limit - a * saved) / deferred)
        x = min(x, number - a)
        most = max(most, (a - 1) * (time_b + time_w) + x * time_w)
    return most


def first_rules(problem: Problem) -> Iterator[PriorityRules]:
    """A set of rules per patience, in which every rank may use all of its spare time."""
    for ahead in (0.0,) if problem.costs.links is None else (1.0, 0.0):
        for patience in _PATIENCE:
            yield PriorityRules(patience, [1.0] * problem.num_ranks, ahead)


def _mutated(rules: PriorityRules, rng: random.Random) -> PriorityRules:
    """One to three changes; each gives neighbouring ranks the same share of their spare time."""
    shares = list(rules.idle_shares)
    for _ in range(rng.choice((1, 1, 2, 3))):
        share = rng.choice(_IDLE_SHARE)
        for rank in _neighbours(len(shares), rng):
            shares[rank] = share
    ahead = rng.choice(_AHEAD) if rules.ahead and rng.random() < 0.3 else rules.ahead
    return PriorityRules(rules.patience, shares, ahead)


def _neighbours(num_ranks: int, rng: random.Random) -> range:
    """One rank, all from one on, or some in a row."""
    first = rng.randrange(num_ranks)
    return range(first, rng.choice((first + 1, first + 1, num_ranks, rng.randint(first + 1, num_ranks))))

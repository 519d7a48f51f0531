"""List scheduling by wish, for any placement: every rank runs what it wishes most of what it can run.

A wish is a number per F and B, the lowest first: the place in some order, or when another plan runs
the action. No wish leads astray. A rank that has no room for what it wishes frees some, or runs
something else; a B that can't leave its W for later takes it along, as a BW; and F's of later
microbatches leave room for those that the oldest still needs on the rank, so that it comes through
whatever happens, is freed, and makes the next one the oldest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from zbpp.schedule.search.problem import Plan, Problem
from zbpp.schedule.timetable import Op

F, B, W, BW = map(int, Op)


class Wishes(NamedTuple):
    """What ranks wish.

    when: by id, of each F and B. whole: by the id of the F, whether its backward is to be a BW.
    patience: another action runs before the one wished if the wait is at least so many times as long;
    eagerness: the same for a W.
    """

    when: Sequence[float]
    whole: Sequence[bool]
    patience: float
    eagerness: float


def dispatch(problem: Problem, wishes: Wishes) -> tuple[float, Plan]:
    """The plan of these wishes, within memory, and its objective or a little more: ranks may have waited."""
    floor = _Floor(problem, wishes)
    floor.run()
    return max(end - offset for end, offset in zip(floor.free, problem.offsets, strict=True)), floor.plan


class _Floor:
    """Events in order of time: a rank is free, or something that it may wait for arrives."""

    def __init__(self, problem: Problem, wishes: Wishes) -> None:
        self.problem, self.wishes, self.number = problem, wishes, problem.num_microbatches
        ranks, stages = range(problem.num_ranks), range(problem.num_stages)
        self.saved = problem.costs.memory[Op.F]
        self.plan: Plan = [[] for _ in ranks]
        self.level, self.free = ([0.0 for _ in ranks] for _ in range(2))
        self.pending: list[list[int]] = [[] for _ in ranks]  # W's, the oldest first
        self.done = [[0 for _ in stages] for _ in range(3)]  # F's, B's, W's
        self.arrivals: list[list[list[float]]] = [[[] for _ in stages] for _ in range(2)]  # of F's, B's
        self.arrivals[F][0] = [0.0] * self.number
        self.asleep = [False for _ in ranks]
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in ranks]

    def run(self) -> None:
        while self.events:
            now, rank = heappop(self.events)
            if now < self.free[rank]:
                continue
            action, wake = self._choice(now, rank)
            self.asleep[rank] = action < 0
            if action >= 0:
                self._run(now, rank, action)
            elif wake < math.inf:
                heappush(self.events, (wake, rank))

    def _choice(self, now: float, rank: int) -> tuple[int, float]:
        """What a rank runs now; or -1, and when to look again."""
        duration, pending = self.problem.duration, self.pending[rank]
        gap = wake = math.inf
        blocked = False
        for _, op, stage in self._candidates(rank):
            (arrival, guess), form = self._arrival(op, stage), self._form(rank, op, stage)
            if form < 0:
                if pending and gap == math.inf:
                    return pending[0], now
                blocked = blocked or arrival < math.inf
            elif arrival > now:
                gap, wake = min(gap, arrival - now, guess), min(wake, arrival)
            elif wake == math.inf or wake - now >= self.wishes.patience * duration[stage * 4 + form]:
                return (stage * 4 + form) * self.number + self.done[op][stage], now
        if pending and (blocked or gap >= self.wishes.eagerness * duration[pending[0] // self.number]):
            return pending[0], now
        return -1, wake

    def _candidates(self, rank: int) -> list[tuple[float, int, int]]:
        """(wish, F or B, stage) of the next F and B of each stage, the most wished first."""
        when, number, (forwards, backwards, _) = self.wishes.when, self.number, self.done
        found = []
        for stage in self.problem.stages_of[rank]:
            f, b = forwards[stage], backwards[stage]
            if f < number:
                found.append((when[stage * 4 * number + f], F, stage))
            if b < f:
                found.append((when[(stage * 4 + B) * number + b], B, stage))
        found.sort()
        return found

    def _form(self, rank: int, op: int, stage: int) -> int:
        """F, B or BW, whichever it is to be; -1 if there is no room for it."""
        level, most = self.level[rank], self.problem.ceilings[rank]
        if op == F:
            return F if level + self.saved[stage] + self._reserve(rank, stage) <= most else -1
        f = stage * 4 * self.number + self.done[B][stage]
        if self.wishes.whole[f] and self.done[W][stage] == self.done[B][stage]:
            return BW
        if level + self.problem.memory[stage * 4 + B] <= most:
            return B
        return -1 if self.pending[rank] else BW

    def _reserve(self, rank: int, stage: int) -> float:
        """What the oldest microbatch of a rank, once begun, still needs beside this F."""
        stages, forwards = self.problem.stages_of[rank], self.done[F]
        oldest = forwards[stages[-1]]  # F's of a microbatch ascend in the stage
        return sum(self.saved[s] for s in stages if forwards[s] == oldest and s != stage)

    def _arrival(self, op: int, stage: int) -> tuple[float, float]:
        """When the next input is there, inf while its sender has not started; and the least it takes then."""
        arrived, microbatch = self.arrivals[op][stage], self.done[op][stage]
        if microbatch < len(arrived):
            return arrived[microbatch], math.inf
        if op == F:
            return math.inf, self.problem.duration[stage * 4 - 4] + self.problem.hop[stage - 1]
        return math.inf, self.problem.duration[stage * 4 + 4 + B] + self.problem.back_hop[stage]

    def _run(self, now: float, rank: int, action: int) -> None:
        kind = action // self.number
        stage, op = kind >> 2, kind & 3
        end = self.free[rank] = now + self.problem.duration[kind]
        self.level[rank] += self.problem.memory[kind]
        self.plan[rank].append(action)
        heappush(self.events, (end, rank))
        if op == W:
            self.done[W][stage] += 1
            self.pending[rank].pop(0)
        elif op == F:
            self.done[F][stage] += 1
            self._send(now, end, F, stage)
        else:
            self.done[B][stage] += 1
            if op == BW:
                self.done[W][stage] += 1
            else:
                self.pending[rank].append(action + self.number)
            self._send(now, end, B, stage)

    def _send(self, now: float, end: float, op: int, stage: int) -> None:
        """From the sender's start on the arrival is known: who waits may choose again."""
        problem = self.problem
        if op == F and stage < problem.num_stages - 1:
            to, at = stage + 1, end + problem.hop[stage]
        elif op == F:
            op, to, at = B, stage, end
        elif stage > 0:
            to, at = stage - 1, end + problem.back_hop[stage - 1]
        else:
            return
        self.arrivals[op][to].append(at)
        rank = problem.rank_of[to]
        if self.asleep[rank]:
            heappush(self.events, (now, rank))

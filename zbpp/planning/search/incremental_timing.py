"""A plan that can be changed one move at a time, and timed again in microseconds.

The plan is a graph: an action waits for the one before it on its rank and for its message. Two
numbers per action say everything (longest paths, as in job-shop scheduling):

    end    the longest path from the start to its end: when it ends
    tail   the longest path from its end to the end of the plan, less the rank's offset

The objective is the largest end + tail; actions that attain it are critical.

`order` is the whole plan sorted by time, a topological order of the graph. A move takes one action
a few places along its rank, so only the window of `order` between the two places has to be looked
at: two short passes give all paths through it, and a path that avoids it is as long as before. A
move that is too long is undone at the cost of the window; one that is kept goes on to whatever
changes outside.
"""

from __future__ import annotations

import math
from itertools import accumulate

from zbpp.planning.problem import Plan, Problem
from zbpp.schedule.timetable import Op, PlanError

F, B, W, BW = map(int, Op)


class Board:
    """The plan as linked, timed actions.

    Id `nobody` stands for "no such action", before and beside the plan; `nobody + 1 + rank` for what
    comes after a rank's last action: it takes no time, and carries the rank's offset as its tail.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        """Raises PlanError if the plan can't run."""
        self.problem, self.rows = problem, [list(row) for row in plan]
        number = problem.num_microbatches
        self.nobody = nobody = 4 * problem.num_stages * number
        size = nobody + 1 + problem.num_ranks
        self.duration = [time for time in problem.duration for _ in range(number)] + [0.0] * (size - nobody)
        self.memory = [change for change in problem.memory for _ in range(number)]
        self.owner = [rank for rank in problem.rank_of for _ in range(4 * number)] + [-1]
        self.source, self.target = [nobody] * size, [nobody] * size  # of an action's message,
        self.lag, self.away = [0.0] * size, [0.0] * size  # and how long it takes
        self.before, self.after = [nobody] * size, [nobody] * size  # on the rank
        self.index, self.place = [-1] * size, [-1] * size  # in the row, in the order
        self.end, self.tail = [0.0] * size, [0.0] * size
        self.tail[nobody] = -math.inf
        for rank, offset in enumerate(problem.offsets):
            self.tail[nobody + 1 + rank] = -offset
        self.backward, self.weight = [nobody] * nobody, [nobody] * nobody  # of an F: its B or BW, W or BW
        forward = list(range(nobody))
        self.chains = ([forward], [self.backward], [self.weight], [self.backward, self.weight])  # by op
        self.levels: list[list[float]] = [[] for _ in plan]
        self.order: list[int] = []
        self.moved: list[int] = []  # by the last move's window: whose end,
        self.eased: list[int] = []  # whose tail is another
        self.value = math.inf
        self.link()

    # -- the graph --------------------------------------------------------------------------------

    def link(self) -> None:
        """Everything anew from `rows`. Raises PlanError if the plan can't run."""
        problem, number = self.problem, self.problem.num_microbatches
        latency, backward_latency = problem.latency, problem.backward_latency
        for a in (a for row in self.rows for a in row):
            op = a // number & 3
            if op in (B, BW):
                self.backward[a - op * number] = a
            if op in (W, BW):
                self.weight[a - op * number] = a
        for stage in range(self.problem.num_stages - 1):
            for f in range(stage * 4 * number, (stage * 4 + 1) * number):
                above = f + 4 * number
                self._connect(f, above, latency[stage])
                self._connect(self.backward[above], self.backward[f], backward_latency[stage])
        for rank in range(len(self.rows)):
            self._string(rank)
        self.order = self._topological()
        self.refresh()

    def _connect(self, source: int, target: int, time: float) -> None:
        self.source[target], self.target[source] = source, target
        self.lag[target] = self.away[source] = time

    def _string(self, rank: int) -> None:
        """Links, places and memory levels along one row."""
        previous, row = self.nobody, self.rows[rank]
        for index, a in enumerate(row):
            self.before[a], self.index[a], self.after[previous] = previous, index, a
            previous = a
        self.after[previous] = self.nobody + 1 + rank
        self.levels[rank] = list(accumulate([self.memory[a] for a in row]))

    def _topological(self) -> list[int]:
        """Let each rank run until it waits for a message; whoever sends it wakes the rank."""
        order: list[int] = []
        done = [False] * self.nobody + [True]
        reached = [0] * len(self.rows)
        waiting: dict[int, int] = {}
        awake = list(range(len(self.rows)))
        while awake:
            rank = awake.pop()
            row = self.rows[rank]
            while reached[rank] < len(row):
                a = row[reached[rank]]
                if not done[self.source[a]]:
                    waiting[self.source[a]] = rank
                    break
                done[a] = True
                order.append(a)
                reached[rank] += 1
                if a in waiting:
                    awake.append(waiting.pop(a))
        if waiting:
            raise PlanError("the plan can't proceed")
        return order

    def refresh(self) -> None:
        """Time everything, and sort the order by time again, which keeps windows short."""
        end, before, source, lag, duration = self.end, self.before, self.source, self.lag, self.duration
        start = {}
        for a in self.order:
            ready, arrival = end[before[a]], end[source[a]] + lag[a]
            start[a] = ready = ready if ready >= arrival else arrival
            end[a] = ready + duration[a]
        self.order.sort(key=start.__getitem__)
        for place, a in enumerate(self.order):
            self.place[a] = place
        tail, after, target, away = self.tail, self.after, self.target, self.away
        for a in reversed(self.order):
            b, c = after[a], target[a]
            rest, path = tail[b] + duration[b], away[a] + duration[c] + tail[c]
            tail[a] = rest if rest >= path else path
        self._set_value()

    def _set_value(self) -> None:
        ends = [self.end[row[-1]] for row in self.rows]
        self.value = max(end - offset for end, offset in zip(ends, self.problem.offsets, strict=True))

    def is_critical(self, a: int) -> bool:
        """Whether an action is on a longest path."""
        return self.end[a] + self.tail[a] >= self.value - self.problem.tolerance

    def fits(self) -> bool:
        """Whether every rank stays within its memory."""
        return all(max(row) <= most for row, most in zip(self.levels, self.problem.ceilings, strict=True))

    # -- moves ------------------------------------------------------------------------------------

    def room(self, a: int) -> tuple[int, int]:
        """The first and the last index that an action may take, by what its own rank knows.

        Microbatches ascend; F, B, W of one microbatch stay in order; so do the two ends of a value
        that stays on the rank. (A move may still be impossible by way of other ranks.)
        """
        number, index, rank = self.problem.num_microbatches, self.index, self.owner[a]
        op, microbatch = a // number & 3, a % number
        f = a - op * number
        earlier, later = [], []
        if op != F:
            earlier.append(f if op != W else self.backward[f])
        if op in (F, B):
            later.append(self.backward[f] if op == F else self.weight[f])
        for chain in self.chains[op]:
            if microbatch > 0:
                earlier.append(chain[f - 1])
            if microbatch < number - 1:
                later.append(chain[f + 1])
        if self.owner[self.source[a]] == rank:
            earlier.append(self.source[a])
        if self.owner[self.target[a]] == rank:
            later.append(self.target[a])
        low = max([index[b] for b in earlier], default=-1) + 1
        return low, min([index[b] for b in later], default=len(self.rows[rank])) - 1

    def move(self, a: int, to: int, limit: float) -> bool:
        """Take an action to another index in its `room`, if the objective stays within a limit.

        False, and nothing has changed, if it would be longer, exceed the memory, or never end.
        """
        rank, at = self.owner[a], self.index[a]
        row = self.rows[rank]
        low, high = (at, to) if to > at else (to, at)
        old = row[low : high + 1]
        new = old[1:] + old[:1] if to > at else old[-1:] + old[:-1]
        level = self.levels[rank][low - 1] if low else 0.0
        levels = list(accumulate([self.memory[x] for x in new], initial=level))
        if max(levels) > self.problem.ceilings[rank]:
            return False
        previous, following = self.before[old[0]], self.after[old[-1]]
        begin, stop = self.place[old[0]], self.place[old[-1]] + 1
        window = self.order[begin:stop]
        self._relink(previous, new, following)
        changed = self._later(a, window, new) if to > at else self._sooner(a, window, new)
        if not changed or not self._passes(changed, begin, limit):
            self._relink(previous, old, following)
            return False
        self._spread_forwards(following, begin + len(changed))
        self._spread_backwards(previous, begin)
        row[low : high + 1] = new
        self.levels[rank][low : high + 1] = levels[1:]
        for index, x in enumerate(new, low):
            self.index[x] = index
        self._set_value()
        return True

    def replace(self, f: int, new: list[int]) -> None:
        """Give an F another backward where its own stands: a BW for B and W side by side, or these for it.

        The caller sees to it that this fits the memory.
        """
        stage, next_stage = f // (4 * self.problem.num_microbatches), 4 * self.problem.num_microbatches
        rank, old = self.owner[f], list(dict.fromkeys((self.backward[f], self.weight[f])))
        at, place = self.index[old[0]], self.place[old[0]]
        self.rows[rank][at : at + len(old)] = new
        self.order[place : place + 1] = new
        self.order = [a for a in self.order if a not in old]
        self.backward[f], self.weight[f] = new[0], new[-1]
        if stage > 0:
            self._connect(new[0], self.backward[f - next_stage], self.problem.backward_latency[stage - 1])
        if stage < self.problem.num_stages - 1:
            self._connect(self.backward[f + next_stage], new[0], self.problem.backward_latency[stage])
        self._string(rank)
        self.refresh()

    def _relink(self, previous: int, segment: list[int], following: int) -> None:
        before, after = self.before, self.after
        for a in segment:
            before[a], after[previous] = previous, a
            previous = a
        after[previous], before[following] = following, previous

    def _later(self, a: int, window: list[int], segment: list[int]) -> list[int]:
        """The window's new order when `a` goes to its end: what waits for `a` comes after it.

        Empty if an action that `a` jumps over waits for it by way of other ranks.
        """
        before, source = self.before, self.source
        waits, others, late = {a}, [], []
        for x in window:
            if source[x] in waits or before[x] in waits:
                waits.add(x)
                late.append(x)
            elif x != a:
                others.append(x)
        if late and not waits.isdisjoint(segment[:-1]):
            return []
        return [*others, a, *late]

    def _sooner(self, a: int, window: list[int], segment: list[int]) -> list[int]:
        """The window's new order when `a` goes to its begin: what `a` waits for comes before it.

        Empty if it waits for an action that it jumps over, by way of other ranks.
        """
        after, target = self.after, self.target
        needed, others, early = {a}, [], []
        for x in reversed(window):
            if target[x] in needed or after[x] in needed:
                needed.add(x)
                early.append(x)
            elif x != a:
                others.append(x)
        if early and not needed.isdisjoint(segment[1:]):
            return []
        return [*reversed(early), a, *reversed(others)]

    def _passes(self, window: list[int], begin: int, limit: float) -> bool:
        """Time the window in its new order and keep it; or undo it if a path in it is too long."""
        end, before, source, lag, duration = self.end, self.before, self.source, self.lag, self.duration
        tail, after, target, away = self.tail, self.after, self.target, self.away
        ends = [end[a] for a in window]
        for a in window:
            start, arrival = end[before[a]], end[source[a]] + lag[a]
            end[a] = (start if start >= arrival else arrival) + duration[a]
        tails = [tail[a] for a in window]
        for a in reversed(window):
            b, c = after[a], target[a]
            rest, path = tail[b] + duration[b], away[a] + duration[c] + tail[c]
            tail[a] = rest = rest if rest >= path else path
            if end[a] + rest > limit:
                for x, was, left in zip(window, ends, tails, strict=True):
                    end[x], tail[x] = was, left
                return False
        self.order[begin : begin + len(window)] = window
        for place, a in enumerate(window, begin):
            self.place[a] = place
        self.moved = [a for a, was in zip(window, ends, strict=True) if end[a] != was]
        self.eased = [a for a, left in zip(window, tails, strict=True) if tail[a] != left]
        return True

    def _spread_forwards(self, following: int, first: int) -> None:
        """From a place on, in order: the ends of all that a change reaches, and of `following`."""
        end, before, source, lag, duration = self.end, self.before, self.source, self.lag, self.duration
        after, target, order, place, nobody = self.after, self.target, self.order, self.place, self.nobody
        reached = [following] + [b for a in self.moved for b in (after[a], target[a])]
        stale = {a for a in reached if place[a] >= first}
        while stale:
            a = order[first]
            first += 1
            if a not in stale:
                continue
            stale.remove(a)
            start, arrival = end[before[a]], end[source[a]] + lag[a]
            ends = (start if start >= arrival else arrival) + duration[a]
            if ends != end[a]:
                end[a] = ends
                if after[a] < nobody:
                    stale.add(after[a])
                if target[a] < nobody:
                    stale.add(target[a])

    def _spread_backwards(self, previous: int, last: int) -> None:
        """From a place back: the tails of all that a change reaches, and of `previous`."""
        tail, after, target, away, duration = self.tail, self.after, self.target, self.away, self.duration
        before, source, order, place, nobody = self.before, self.source, self.order, self.place, self.nobody
        reached = [previous] + [b for a in self.eased for b in (before[a], source[a])]
        stale = {a for a in reached if 0 <= place[a] < last}
        while stale:
            last -= 1
            a = order[last]
            if a not in stale:
                continue
            stale.remove(a)
            b, c = after[a], target[a]
            rest, path = tail[b] + duration[b], away[a] + duration[c] + tail[c]
            if path > rest:
                rest = path
            if rest != tail[a]:
                tail[a] = rest
                if before[a] < nobody:
                    stale.add(before[a])
                if source[a] < nobody:
                    stale.add(source[a])

"""A plan that can be changed one move at a time, and timed again in microseconds.

The plan is a graph: an action waits for the action before it on its rank and for its message. As
usual in job-shop scheduling, two longest paths through an action say everything about it:

    from_start   from the start of the plan to the end of the action: when the action ends
    to_end       from the start of the action to the end of the plan, less the rank's offset

The two paths overlap in the action itself, so the longest path through an action is from_start +
to_end - duration. The objective is the largest of these; actions that attain it are critical.

`order` lists all actions by start time. That is a topological order of the graph. A move takes one
action a few places along its rank, and changes only a window of `order`: the part between the
action's old and new neighbours. Two passes over the window give all longest paths through it. If one
of them is above the limit, the window is restored, and nothing else was touched. If not, the changes
are propagated to the actions outside that they reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from zbpp.planning.problem import Plan, Problem
from zbpp.schedule.dataflow_arrays import op_of
from zbpp.schedule.timetable import Op, PlanError

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


class IncrementalTiming:
    """The plan as linked, timed actions.

    Everything is a list indexed by the action's id, since attributes of objects take twice as long:

        duration, memory, rank_of    what the problem says about the action
        index                        its place in its row, -1 if the plan does not contain it
        position                     its place in `order`
        from_start, to_end           its links and longest paths (`Paths`)
        backward, weight             of an F: its B or BW, its W or BW

    Id `none` stands for "no such action"; `none + 1 + rank` for the end of a rank's row: this takes
    no time, and its path to the end is minus the rank's offset.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        """Raises PlanError if the plan can't run."""
        self.problem, self.rows = problem, [list(row) for row in plan]
        number = problem.num_microbatches
        self.none = none = 4 * problem.num_stages * number
        size = none + 1 + problem.num_ranks
        self.duration = [time for time in problem.duration for _ in range(number)] + [0.0] * (size - none)
        self.memory = [change for change in problem.memory for _ in range(number)]
        self.rank_of = [rank for rank in problem.rank_of for _ in range(4 * number)] + [-1]
        self.index, self.position = [-1] * size, [-1] * size
        self.from_start, self.to_end = (
            Paths([0.0] * size, [none] * size, [none] * size, [0.0] * size) for _ in range(2)
        )
        self.to_end.length[none] = -math.inf
        for rank, offset in enumerate(problem.offsets):
            self.to_end.length[none + 1 + rank] = -offset
        self.backward, self.weight = [none] * none, [none] * none
        # Per op, what ascends together with it: BW counts as B and as W.
        self.ascending = ([list(range(none))], [self.backward], [self.weight], [self.backward, self.weight])
        self.levels: list[list[float]] = [[] for _ in plan]  # memory after each action of a row
        self.order: list[int] = []
        self.value = math.inf
        self.rebuild()

    # -- the graph --------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Link and time everything anew from `rows`. Raises PlanError if the plan can't run."""
        self.index = [-1] * len(self.index)
        for rank in range(len(self.rows)):
            self._link_row(rank)
        for row in self.rows:
            self._link_messages(row)
            self._note_backwards(row)
        self.order = self._topological()
        self.refresh()

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
        number, index = self.problem.num_microbatches, self.index
        senders, latency = self.problem.messages.senders, self.problem.messages.latency
        for a in actions:
            kind = a // number
            for sending in senders[kind]:
                sender = a + (sending - kind) * number
                if index[sender] >= 0:
                    self.from_start.partner[a], self.to_end.partner[sender] = sender, a
                    self.from_start.latency[a] = self.to_end.latency[sender] = latency[kind]

    def _note_backwards(self, actions: Iterable[int]) -> None:
        number = self.problem.num_microbatches
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

    # -- times ------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Time everything, and sort the order by start again, which keeps windows short."""
        starts = dict(zip(self.order, self._time(self.from_start, self.order), strict=True))
        self.order.sort(key=starts.__getitem__)
        for position, a in enumerate(self.order):
            self.position[a] = position
        self._time(self.to_end, reversed(self.order))
        self._set_value()

    def start(self, a: int) -> float:
        return self.from_start.length[a] - self.duration[a]

    def is_critical(self, a: int) -> bool:
        """Whether an action is on a longest path."""
        through = self.start(a) + self.to_end.length[a]
        return through >= self.value - self.problem.tolerance

    def fits(self) -> bool:
        """Whether every rank stays within its memory."""
        return all(max(row) <= most for row, most in zip(self.levels, self.problem.ceilings, strict=True))

    def _time(self, paths: Paths, actions: Iterable[int]) -> list[float]:
        """Set the longest paths of actions in an order of the graph; return the paths without the action."""
        length, neighbour, partner, latency = paths
        duration, without = self.duration, []
        for a in actions:
            free, arrival = length[neighbour[a]], length[partner[a]] + latency[a]
            longest = free if free >= arrival else arrival  # max() takes twice as long
            length[a] = longest + duration[a]
            without.append(longest)
        return without

    def _set_value(self) -> None:
        ends = [self.from_start.length[row[-1]] for row in self.rows]
        self.value = max(end - offset for end, offset in zip(ends, self.problem.offsets, strict=True))

    # -- moves ------------------------------------------------------------------------------------

    def feasible_range(self, a: int) -> tuple[int, int]:
        """The first and the last index in its row that an action may take, by what its own rank knows.

        Microbatches ascend; F, B, W of one microbatch stay in order; so do the two ends of a message
        that stays on the rank. (A move may still be impossible by way of other ranks.)
        """
        number, index, rank = self.problem.num_microbatches, self.index, self.rank_of[a]
        kind, microbatch = divmod(a, number)
        op = op_of(kind)
        f = a - op * number
        earlier, later = [], []
        if op != F:
            earlier.append(f if op != W else self.backward[f])
        if op in (F, B):
            later.append(self.backward[f] if op == F else self.weight[f])
        for of_forward in self.ascending[op]:
            if microbatch > 0:
                earlier.append(of_forward[f - 1])
            if microbatch < number - 1:
                later.append(of_forward[f + 1])
        sender, receiver = self.from_start.partner[a], self.to_end.partner[a]
        if self.rank_of[sender] == rank:
            earlier.append(sender)
        if self.rank_of[receiver] == rank:
            later.append(receiver)
        low = max([index[b] for b in earlier], default=-1) + 1
        return low, min([index[b] for b in later], default=len(self.rows[rank])) - 1

    def move(self, a: int, to: int, limit: float) -> bool:
        """Take an action to another index in its feasible range, if the objective stays within a limit.

        False, and nothing has changed, if it would be longer, exceed the memory, or never end.
        """
        rank, at = self.rank_of[a], self.index[a]
        row = self.rows[rank]
        low, high = (at, to) if to > at else (to, at)
        old = row[low : high + 1]
        new = old[1:] + old[:1] if to > at else old[-1:] + old[:-1]
        level = self.levels[rank][low - 1] if low else 0.0
        levels = list(accumulate([self.memory[x] for x in new], initial=level))
        if max(levels) > self.problem.ceilings[rank]:
            return False
        previous, following = self.from_start.neighbour[old[0]], self.to_end.neighbour[old[-1]]
        begin, stop = self.position[old[0]], self.position[old[-1]] + 1
        self._link_neighbours(previous, new, following)
        window = self._reordered(a, self.order[begin:stop], later=to > at)
        changed = self._time_window(window, begin, limit) if window else None
        if changed is None:
            self._link_neighbours(previous, old, following)
            return False
        ends, starts = changed
        self._propagate(self.from_start, self.to_end, ends, following, range(stop, len(self.order)))
        self._propagate(self.to_end, self.from_start, starts, previous, range(begin - 1, -1, -1))
        row[low : high + 1] = new
        self.levels[rank][low : high + 1] = levels[1:]
        for index, x in enumerate(new, low):
            self.index[x] = index
        self._set_value()
        return True

    def replace_backward(self, f: int, new: list[int]) -> None:
        """Give an F another backward where its own stands: [BW] for B and W side by side, or [B, W] for BW.

        The caller sees to it that this fits the memory.
        """
        number, rank = self.problem.num_microbatches, self.rank_of[f]
        old = list(dict.fromkeys((self.backward[f], self.weight[f])))
        at, position = self.index[old[0]], self.position[old[0]]
        self.rows[rank][at : at + len(old)] = new
        self.order[position : position + 1] = new
        self.order = [a for a in self.order if a not in old]
        for a in old:
            self.index[a] = -1
        self._link_row(rank)
        self._note_backwards(new)
        self._link_messages(new)
        kind = new[0] // number
        receivers = [new[0] + (each - kind) * number for each in self.problem.messages.receivers[kind]]
        self._link_messages(a for a in receivers if self.index[a] >= 0)
        self.refresh()

    def _reordered(self, a: int, window: list[int], later: bool) -> list[int]:
        """The window with `a` at its end (later) or its begin, links being those after the move.

        If `a` goes to the end, the actions that wait for `a` go behind it. If `a` goes to the begin,
        the actions that it waits for go before it. Empty if the links have a circle: `a` waits for
        an action that waits for `a` by way of other ranks.
        """
        paths = self.from_start if later else self.to_end
        neighbour, partner = paths.neighbour, paths.partner
        linked, others, taken_along = {a}, [], []
        for x in window if later else reversed(window):
            if partner[x] in linked or neighbour[x] in linked:
                linked.add(x)
                taken_along.append(x)
            elif x != a:
                others.append(x)
        if neighbour[a] in linked:
            return []
        new = [*others, a, *taken_along]
        return new if later else new[::-1]

    def _time_window(self, window: list[int], begin: int, limit: float) -> tuple[list[int], list[int]] | None:
        """Time the window in its new order; None, and all as before, if a path in it is above the limit.

        Returns the actions whose path from the start changed, and those whose path to the end did.
        """
        lengths = self.from_start.length
        ends = [lengths[a] for a in window]
        self._time(self.from_start, window)
        rests, neighbour, partner, latency = self.to_end
        old_rests = [rests[a] for a in window]
        duration = self.duration
        for a in reversed(window):
            free, arrival = rests[neighbour[a]], rests[partner[a]] + latency[a]
            longest = free if free >= arrival else arrival
            rests[a] = longest + duration[a]
            if lengths[a] + longest > limit:
                for x, end, rest in zip(window, ends, old_rests, strict=True):
                    lengths[x], rests[x] = end, rest
                return None
        self.order[begin : begin + len(window)] = window
        for position, a in enumerate(window, begin):
            self.position[a] = position
        return (
            [a for a, end in zip(window, ends, strict=True) if lengths[a] != end],
            [a for a, rest in zip(window, old_rests, strict=True) if rests[a] != rest],
        )

    def _propagate(
        self, paths: Paths, mirrored: Paths, changed: list[int], first: int, outside: range
    ) -> None:
        """Time again, at the positions outside the window, what the changed actions reach, and `first`.

        paths: in the direction of `outside`; mirrored: in the other, where the links lead onwards.
        """
        length, neighbour, partner, latency = paths
        next_neighbour, next_partner = mirrored.neighbour, mirrored.partner
        order, position, duration, none = self.order, self.position, self.duration, self.none
        reached = [first] + [b for a in changed for b in (next_neighbour[a], next_partner[a])]
        due = {a for a in reached if position[a] in outside}
        for at in outside:
            if not due:
                return
            a = order[at]
            if a not in due:
                continue
            due.remove(a)
            free, arrival = length[neighbour[a]], length[partner[a]] + latency[a]
            new = (free if free >= arrival else arrival) + duration[a]
            if new != length[a]:
                length[a] = new
                if next_neighbour[a] < none:
                    due.add(next_neighbour[a])
                if next_partner[a] < none:
                    due.add(next_partner[a])

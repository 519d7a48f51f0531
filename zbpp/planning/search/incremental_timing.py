"""A plan that can be changed one move at a time, and timed again in microseconds.

As usual in job-shop scheduling, two longest paths through an action say everything about it:

    from_start   from the start of the plan to the end of the action: when the action ends
    to_end       from the start of the action to the end of a rank's row, less the offset of that rank

The offset is minus the rank's shortest reduction for the makespan; for the span it is the time at which the
rank's first F can start. See `Problem.offsets`.
The two paths overlap in the action itself, so the longest path through an action is from_start +
to_end - duration. The objective is the largest of these; actions that attain it are critical.

`order` lists all actions by start time. That is a topological order of the graph. A move takes one
action a few places along its rank, and changes only a window of `order`: the part between the
action's old and new neighbours. Two passes over the window give the longest path through each of its actions.
If one of these paths is longer than allowed, the window is restored, and nothing else was touched.
If not, the changes are propagated to the actions outside the window that they reach.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from zbpp.planning.problem import Plan, Problem
from zbpp.planning.search.plan_graph import Paths, PlanGraph


class IncrementalTiming(PlanGraph):
    """The plan with its times; `value` is its objective (ms), `position` an action's place in `order`."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        """Raises PlanError if the plan can't run."""
        super().__init__(problem, plan)
        self.position = [-1] * len(self.index)
        self.refresh()

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

    def _time(self, paths: Paths, actions: Iterable[int]) -> list[float]:
        """Set the longest paths of actions in an order of the graph; return the paths without the action."""
        length, neighbour, partner, latency = paths
        duration, without = self.duration, []
        for a in actions:
            free, arrival = length[neighbour[a]], length[partner[a]] + latency[a]
            longest = free if free >= arrival else arrival  # no call of max(): this is the hottest loop
            length[a] = longest + duration[a]
            without.append(longest)
        return without

    def _set_value(self) -> None:
        ends = [self.from_start.length[row[-1]] for row in self.rows]
        self.value = max(end - offset for end, offset in zip(ends, self.problem.offsets, strict=True))

    # -- moves ------------------------------------------------------------------------------------

    def move(self, a: int, to: int, max_value: float) -> bool:
        """Take an action to another index in its feasible range, if the objective stays within `max_value`.

        False, and nothing has changed, if the plan would be longer, exceed the memory, or never end.
        """
        rank, at = self.rank_of_action[a], self.index[a]
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
        changed = self._time_window(window, begin, max_value) if window else None
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

    def _reordered(self, a: int, window: list[int], later: bool) -> list[int]:
        """The window's actions in an order that fits the links after the move.

        `a` goes to the end (later), and the actions that wait for `a` behind it; or `a` goes to the
        beginning, and the actions that it waits for before it. Empty if the links have a circle: `a`
        waits for an action that waits for `a` by way of other ranks.
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

    def _time_window(
        self, window: list[int], begin: int, max_value: float
    ) -> tuple[list[int], list[int]] | None:
        """Time the window in its new order; None, and all as before, if a path in it exceeds max_value.

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
            if lengths[a] + longest > max_value:
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
        """Recompute the paths of `first`, and of every action outside the window that a change reaches.

        changed: the actions of the window whose paths changed. outside: the positions to go through.
        paths: those that are recomputed; mirrored: those of the other direction, whose links lead on.
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

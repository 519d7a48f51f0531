"""V-Half and V-Min, of "Pipeline Parallelism with Controllable Memory" (arXiv:2405.15362).

Two stages per rank, in a V (rank r owns r and 2p - 1 - r), and less memory than 1F1B. A building
block says in which slot a rank runs the four passes of a microbatch: down (F), back (F), back (B),
down (B). It repeats every 6 slots, each W takes the first slot left free after its B. How long a
block holds an activation is how much memory the schedule needs.

Blocks laid one after the other leave holes where microbatches begin and end. So the actions run
again, in slots of one action each, and a rank that would wait pulls something forward: the first
action of its order that can run, if those it overtakes still fit the memory afterwards. In
every slot somebody's first action can run, so this ends. Overtaking is tried in two ways (W's in
their turn, or only where there is no F or B); the shorter timetable wins. Over n microbatches of
unit passes the bubble comes to 6p - 3k - 1 at a peak of k stage-activations, the least that is
possible: for V-Half at every p > 2, for V-Min but for p = 11, 14, 17, ... (a few passes more).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Action, Op, Timetable

Kind = tuple[int, Op]
Slots = tuple[int, int, int, int]

_PERIOD = 6
_CHANGE = {Op.F: 2, Op.B: -1, Op.W: -1}  # of the memory, in halves of a stage-activation


def v_half(num_ranks: int, num_microbatches: int) -> Timetable:
    """About half of 1F1B's memory: (p + 2)//2 microbatches, in activations of a rank.

    Bubble 3p - 7 passes of a stage (3p - 4 at odd p) at F = B = W; its steady phase has none while
    W + 2B >= 2F and W + 2F >= 2B.

    p=2, m=3:
        0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 0B0 0W0 3W1 3F2 3B2 0B1 0W1 0B2 3W2 0W2
        1F0 2F0 1F1 2F1 2B0 2W0 1B0 1W0 1F2 2F2 2B1 1B1 2B2 1B2 2W1 1W1 2W2 1W2
    """
    extra = 3 if num_ranks % 2 == 0 else 0

    def starts(rank: int) -> Slots:
        turn = 3 * num_ranks + extra
        return 2 * rank, 3 * num_ranks - rank - 2, turn + 2 * rank - 1, turn + 3 * num_ranks - rank - 2

    return _repeated(num_ranks, num_microbatches, starts, limit=(num_ranks + 2) // 2)


def v_min(num_ranks: int, num_microbatches: int) -> Timetable:
    """About a third of 1F1B's memory: (p + 4)//3 microbatches.

    Bubble at most 4p - 5 passes of a stage at F = B = W. Where the times differ the steady phase has a
    bubble too, with every microbatch: V-Half is the safe choice.

    p=2, m=3:
        0F0 0F1 0F2 3F0 3B0 3W0 3F1 0B0 3B1 0W0 3W1 0B1 3F2 3B2 0W1 3W2 0B2 0W2
        1F0 2F0 1F1 2F1 2B0 1B0 1F2 2W0 2B1 1B1 2F2 1W0 2W1 2B2 1B2 1W1 2W2 1W2
    """
    extra = 2 if num_ranks % 3 == 0 else 0

    def starts(rank: int) -> Slots:
        turn = 2 * num_ranks + extra
        return rank, 2 * num_ranks - rank - 1, turn + rank, turn + 2 * num_ranks - rank - 1

    return _repeated(num_ranks, num_microbatches, starts, limit=(num_ranks + 4) // 3)


def _repeated(num_ranks: int, num_microbatches: int, starts: Callable[[int], Slots], limit: int) -> Timetable:
    """The blocks of all ranks, repeated and squeezed; limit: microbatches in memory, two stages each."""
    orders = [
        _order(rank, 2 * num_ranks - 1 - rank, starts(rank), num_microbatches) for rank in range(num_ranks)
    ]
    values = Values(2 * num_ranks, num_microbatches)
    squeezed = [_squeezed(orders, values, 4 * limit, w_last=w_last) for w_last in (False, True)]
    return min(squeezed, key=lambda timetable: simulate(timetable).max_span)


def _order(down: int, back: int, starts: Slots, num_microbatches: int) -> list[Action]:
    """The actions of a rank by their slots."""
    kinds = ((down, Op.F), (back, Op.F), (back, Op.B), (down, Op.B))
    slots = {
        start + _PERIOD * microbatch: Action(*kind, microbatch)
        for kind, start in zip(kinds, starts, strict=True)
        for microbatch in range(num_microbatches)
    }
    order: list[Action] = []
    waiting: deque[Action] = deque()
    slot = 0
    while slots or waiting:
        if slot in slots:
            order.append(slots.pop(slot))
            waiting += [action._replace(op=Op.W) for action in order[-1:] if action.op == Op.B]
        elif waiting:
            order.append(waiting.popleft())
        slot += 1
    return order


def _squeezed(orders: list[list[Action]], values: Values, most: int, *, w_last: bool) -> Timetable:
    """All ranks in step, one action per slot: what runs in a slot can be used in the next."""
    ranks = [_Rank(order, values, most, w_last) for order in orders]
    there = bytearray(len(values))
    while True:
        ran = [action for rank in ranks for action in rank.run(there)]
        if not ran:
            return Timetable(rank.done for rank in ranks)
        for stage, op, microbatch in ran:
            for first in values.produced[stage * len(Op) + op]:
                there[first + microbatch] = 1


class _Rank:
    """One rank on its way through its order."""

    def __init__(self, order: list[Action], values: Values, most: int, w_last: bool) -> None:
        self.order: list[Action | None] = [*order]  # None: has run
        self.values, self.most, self.w_last = values, most, w_last
        self.head = self.level = 0
        self.forwards = sum(action.op == Op.F for action in order)
        self.ahead: dict[Kind, deque[int]] = {}  # where in the order the next of a kind are
        for position, (stage, op, _) in enumerate(order):
            self.ahead.setdefault((stage, op), deque()).append(position)
        self.done: list[Action] = []

    def run(self, there: bytearray) -> list[Action]:
        """The action that runs in this slot, if any: the first that has its inputs and room."""
        for position in self._preferred():
            action = self.order[position]
            if action and self._has_inputs(action, there) and self._fits(action, position):
                self._take(action, position)
                return [action]
        return []

    def _preferred(self) -> list[int]:
        """In order, but W's behind all others once they fill holes rather than free memory for F's."""
        late = Op.W if self.w_last or not self.forwards else None
        first = sorted((op == late, positions[0]) for (_, op), positions in self.ahead.items() if positions)
        return [position for _, position in first]

    def _has_inputs(self, action: Action, there: bytearray) -> bool:
        stage, op, microbatch = action
        return all(there[first + microbatch] for first in self.values.consumed[stage * len(Op) + op])

    def _fits(self, action: Action, position: int) -> bool:
        """Whether the memory holds it, now and while those that it overtakes run in their order."""
        if action.op != Op.F:
            return True
        overtaken = (_CHANGE[each.op] for each in self.order[self.head : position] if each)
        return max(itertools.accumulate(overtaken, initial=self.level + _CHANGE[Op.F])) <= self.most

    def _take(self, action: Action, position: int) -> None:
        self.ahead[action[:2]].popleft()
        self.order[position] = None
        while self.head < len(self.order) and self.order[self.head] is None:
            self.head += 1
        self.level += _CHANGE[action.op]
        self.forwards -= action.op == Op.F
        self.done.append(action)

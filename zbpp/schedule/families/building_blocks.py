"""V-Half and V-Min, of "Pipeline Parallelism with Controllable Memory" (arXiv:2405.15362).

Two stages per rank, in a V (rank r owns stages r and 2p - 1 - r), and less memory than 1F1B. A building
block says in which slots the F's and B's of one microbatch run. V-Min's block for two ranks:

    slot    0   1   2   3   4   5   6   7
    rank 0  0F          3F  3B          0B
    rank 1      1F  2F          2B  1B

The next microbatch's block begins 6 slots later, and each W takes the first slot that is free after its B.
A block that is shorter holds its activations for a shorter time, so the schedule needs less memory.

Blocks alone leave slots empty at the beginning and the end of a step. So a small simulation executes the
order of actions that they give, one action per rank and slot. A rank whose next action has to wait takes a
later one: the first action in its order that has its inputs. An F may overtake other actions only if these
still fit into the memory when they run after it. Of all actions that have not run, the one with the earliest
slot can always run, so the simulation ends with all of them run. It runs twice: once with the W's where the
order has them, once with W's only where neither F nor B can run. The timetable with the smaller `max_span` is
taken.

Where every action takes one unit of time and p > 2, the bubble is then 6p - 3k - 1 at a peak of k
stage-activations. That is the least possible: for V-Half at every p > 2; for V-Min at every p > 2 but 11, 14,
17, ..., where the bubble is a few units longer.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

import numpy as np

from zbpp.schedule.costs import Costs
from zbpp.schedule.dataflow_arrays import Values
from zbpp.schedule.simulate import simulate
from zbpp.schedule.timetable import Action, Integers, Op, StageOp, Timetable, units_in_order

Block = tuple[int, int, int, int]
"""The slots in which a rank runs F of its first stage, F and B of its second, and B of its first."""

_PERIOD = 6  # slots between the blocks of two microbatches: two stages with F, B and W each
_MEMORY_CHANGE = {Op.F: 2, Op.B: -1, Op.W: -1}  # in halves of a stage-activation


def v_half(num_ranks: int, num_microbatches: int, *, num_slices: int = 1) -> Timetable:
    """About half of 1F1B's memory: at most 2((p + 2)//2 + S - 1)/S stage-activations.

    1F1B's would be 2(p + S - 1)/S.

    For p > 2 the bubble at F = B = W is 3p - 7 actions long, 3p - 4 at odd p. The steady phase has none while
    W + 2B >= 2F and W + 2F >= 2B.

    p=2, m=3:
        0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 0B0 0W0 3W1 3F2 3B2 0B1 0W1 0B2 3W2 0W2
        1F0 2F0 1F1 2F1 2B0 2W0 1B0 1W0 1F2 2F2 2B1 1B1 2B2 1B2 2W1 1W1 2W2 1W2
    """
    return _squeezed(num_ranks, num_microbatches, num_slices, v_half_block, limit=(num_ranks + 2) // 2)


def v_min(num_ranks: int, num_microbatches: int, *, num_slices: int = 1) -> Timetable:
    """About a third of 1F1B's memory: at most 2((p + 4)//3 + S - 1)/S stage-activations.

    1F1B's would be 2(p + S - 1)/S.

    For p > 1 the bubble at F = B = W is at most 4p - 5 actions long. Where the times differ, every microbatch
    of the steady phase adds to the bubble: V-Half is the safe choice.

    p=2, m=3:
        0F0 0F1 0F2 3F0 3B0 3W0 3F1 0B0 3B1 0W0 3W1 0B1 3F2 3B2 0W1 3W2 0B2 0W2
        1F0 2F0 1F1 2F1 2B0 1B0 1F2 2W0 2B1 1B1 2F2 1W0 2W1 2B2 1B2 1W1 2W2 1W2
    """
    return _squeezed(num_ranks, num_microbatches, num_slices, v_min_block, limit=(num_ranks + 4) // 3)


def v_half_block(num_ranks: int, rank: int) -> Block:
    """The forward goes down the V in two slots per rank and back up in one; so does the backward."""
    # At even p the backward begins 3 slots later: otherwise two actions of a rank would share a slot.
    turn = 3 * num_ranks + (3 if num_ranks % 2 == 0 else 0)
    return 2 * rank, 3 * num_ranks - rank - 2, turn + 2 * rank - 1, turn + 3 * num_ranks - rank - 2


def v_min_block(num_ranks: int, rank: int) -> Block:
    """The forward goes down the V and back up in one slot per rank; so does the backward."""
    # If 3 divides p the backward begins 2 slots later: otherwise two actions of a rank would share a slot.
    turn = 2 * num_ranks + (2 if num_ranks % 3 == 0 else 0)
    return rank, 2 * num_ranks - rank - 1, turn + rank, turn + 2 * num_ranks - rank - 1


def _squeezed(
    num_ranks: int, num_microbatches: int, num_slices: int, block: Callable[[int, int], Block], limit: int
) -> Timetable:
    """The timetable made of all units' blocks, without empty slots.

    With slices the B's of all blocks come S - 1 periods later: B number j is that of unit j with its slices
    counted from the end.
    limit: how many units' activations, of both stages, a rank may hold; with slices S - 1 more.
    """
    units = np.arange(num_microbatches * num_slices, dtype=np.int32)
    orders = [
        _order((rank, 2 * num_ranks - 1 - rank), block(num_ranks, rank), units, num_slices)
        for rank in range(num_ranks)
    ]
    values = Values(2 * num_ranks, len(units))
    most = 4 * (limit + num_slices - 1)  # a unit is one activation, or two halves, on each of two stages
    found = [_run(orders, values, most, w_last=w_last, num_slices=num_slices) for w_last in (False, True)]
    costs = Costs().unit_slices(num_slices)
    return min(found, key=lambda timetable: simulate(timetable, costs).max_span)


def _order(stages: tuple[int, int], block: Block, units: Integers, num_slices: int) -> list[Action]:
    """The actions of a rank in the order of their slots."""
    first, second = stages
    block_ops = ((first, Op.F), (second, Op.F), (second, Op.B), (first, Op.B))
    ahead = num_slices - 1
    in_order = {op: units_in_order(op, units, num_slices).tolist() for op in (Op.F, Op.B)}
    slots = {
        start + _PERIOD * (place if op == Op.F else place + ahead): Action(stage, op, unit)
        for (stage, op), start in zip(block_ops, block, strict=True)
        for place, unit in enumerate(in_order[op])
    }
    order: list[Action] = []
    waiting: deque[Action] = deque()
    slot = 0
    while slots or waiting:
        if action := slots.pop(slot, None):
            order.append(action)
            if action.op == Op.B:
                waiting.append(action._replace(op=Op.W))
        elif waiting:
            order.append(waiting.popleft())
        slot += 1
    return order


def _run(
    orders: list[list[Action]], values: Values, most: int, *, w_last: bool, num_slices: int
) -> Timetable:
    """Run all ranks, one action per slot: a value made in a slot can be used in the next slot."""
    queues = [_Queue(order, values, most, w_last) for order in orders]
    exists = bytearray(len(values))
    while True:
        ran = [action for queue in queues if (action := queue.take(exists))]
        if not ran:
            return Timetable((queue.taken for queue in queues), num_slices=num_slices)
        for stage, op, unit in ran:
            for value in values.produced[stage * len(Op) + op]:
                exists[value + unit] = 1


class _Queue:
    """One rank's actions in order, and which of them have run.

    most: the memory that the rank may hold, in halves of a stage-activation.
    """

    def __init__(self, order: list[Action], values: Values, most: int, w_last: bool) -> None:
        self.order: list[Action | None] = [*order]  # None: has run
        self.values, self.most, self.w_last = values, most, w_last
        self.head = 0  # position of the first action that has not run
        self.memory = 0
        self.forwards_left = sum(action.op == Op.F for action in order)
        self.positions: dict[StageOp, deque[int]] = {}  # of the actions that have not run
        for position, (stage, op, _) in enumerate(order):
            self.positions.setdefault((stage, op), deque()).append(position)
        self.taken: list[Action] = []

    def take(self, exists: bytearray) -> Action | None:
        """Take the first action that has its inputs and fits into the memory; None if there is none."""
        for position in self._candidates():
            action = self.order[position]
            if action and self._has_inputs(action, exists) and self._fits(action, position):
                self._remove(action, position)
                return action
        return None

    def _candidates(self) -> list[int]:
        """The position of the next action of each stage and op, in order.

        W's come last if w_last. They also come last once no F is left, since then no action needs the memory
        that a W frees.
        """
        next_up = [(op, positions[0]) for (_, op), positions in self.positions.items() if positions]
        if self.w_last or not self.forwards_left:
            next_up.sort(key=lambda each: (each[0] == Op.W, each[1]))
        else:
            next_up.sort(key=lambda each: each[1])
        return [position for _, position in next_up]

    def _has_inputs(self, action: Action, exists: bytearray) -> bool:
        stage, op, unit = action
        return all(exists[value + unit] for value in self.values.consumed[stage * len(Op) + op])

    def _fits(self, action: Action, position: int) -> bool:
        """Whether the memory suffices now, and while the overtaken actions run in their order."""
        if action.op != Op.F:
            return True
        overtaken = (_MEMORY_CHANGE[each.op] for each in self.order[self.head : position] if each)
        levels = itertools.accumulate(overtaken, initial=self.memory + _MEMORY_CHANGE[Op.F])
        return max(levels) <= self.most

    def _remove(self, action: Action, position: int) -> None:
        self.positions[action[:2]].popleft()
        self.order[position] = None
        while self.head < len(self.order) and self.order[self.head] is None:
            self.head += 1
        self.memory += _MEMORY_CHANGE[action.op]
        if action.op == Op.F:
            self.forwards_left -= 1
        self.taken.append(action)

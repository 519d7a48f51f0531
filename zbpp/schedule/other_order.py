"""Another timetable for the same stages on the same ranks: a random one that can run.

No schedule may change a number, so a step under another one must give the same losses and gradients.

The actions are drawn one after the other, each among those that some rank can run next. On each stage
microbatches ascend, and B and W of a microbatch may be one BW or two actions. No stage holds more
microbatches between F and B, or between B and W, than under the given timetable (between B and W one at
least).

Stages of one rank may share a parameter. The W's of such stages keep their order, since they add to one
gradient, and sums of floating-point numbers depend on their order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator

from zbpp.schedule.dataflow import Value, consumes, produces
from zbpp.schedule.timetable import Action, Op, Timetable


def other_order(timetable: Timetable, seed: int, sharing: Collection[int] = ()) -> Timetable:
    """A timetable with the same placement and number of microbatches.

    seed: of the draws. sharing: the stages that share a parameter with another stage of their rank.
    """
    rng, draw = random.Random(seed), _Draw(timetable, sharing)
    rows: list[list[Action]] = [[] for _ in timetable.rows]
    ranks = [rank for rank, row in enumerate(timetable.rows) if len(row)]
    while True:
        # The first rank that can run something, in a random order: the others may wait for it.
        order = rng.sample(ranks, len(ranks))
        ready = next((found for rank in order if (found := [*draw.ready(rank)])), None)
        if ready is None and draw.relax():
            continue
        if ready is None:
            return Timetable(rows)
        action = rng.choice(ready)
        draw.take(action)
        rows[timetable.rank_of[action.stage]].append(action)


class _Draw:
    """What has been drawn so far, and so what can be drawn next."""

    def __init__(self, timetable: Timetable, sharing: Collection[int]) -> None:
        self._num_stages, self._num_microbatches = timetable.num_stages, timetable.num_microbatches
        self._stages: list[list[int]] = [[] for _ in timetable.rows]
        for stage, rank in enumerate(timetable.rank_of):
            self._stages[rank].append(stage)
        self._most = most_held(timetable)
        self._held = Counter[tuple[str, int]]()
        self._next = Counter[tuple[int, Op]]()  # per stage and F, B, W: its next microbatch
        self._there: set[Value] = set()
        self._sharing = frozenset(sharing)
        # Per rank, the W's and BW's of stages that share: stage and microbatch, the next one last.
        self._order = [
            [(each.stage, each.microbatch) for each in row if _is_ordered(each, self._sharing)][::-1]
            for row in timetable.rows
        ]
        self._rank_of = timetable.rank_of
        self._num_left = sum(map(len, self._stages)) * self._num_microbatches  # B's and BW's
        self._may_defer_more = False

    def relax(self) -> bool:
        """If nothing can run and B's are left, let the next one wait for its W beyond the limit."""
        self._may_defer_more = self._num_left > 0
        return self._may_defer_more

    def ready(self, rank: int) -> Iterator[Action]:
        """The actions that the rank can run next."""
        for stage in self._stages[rank]:
            for op in Op:
                action = Action(stage, op, self._next[stage, Op.B if op is Op.BW else op])
                if action.microbatch < self._num_microbatches and self._can_run(action):
                    yield action

    def _can_run(self, action: Action) -> bool:
        stage, op, microbatch = action
        if op is Op.F and self._held["saved", stage] >= self._most["saved", stage]:
            return False
        is_full = self._held["deferred", stage] >= max(1, self._most["deferred", stage])
        if op is Op.B and is_full and not self._may_defer_more:
            return False
        order = self._order[self._rank_of[stage]]
        if _is_ordered(action, self._sharing) and order[-1] != (stage, microbatch):
            return False
        if op is Op.BW and self._next[stage, Op.W] != microbatch:  # a BW is a W, too, and W's ascend
            return False
        return self._there.issuperset(consumes(action))

    def take(self, action: Action) -> None:
        """The action runs."""
        self._there.difference_update(consumes(action))
        self._there.update(produces(action, self._num_stages))
        _count(action, self._held)
        self._may_defer_more = False
        self._num_left -= action.op in (Op.B, Op.BW)
        if _is_ordered(action, self._sharing):
            self._order[self._rank_of[action.stage]].pop()
        for op in (Op.B, Op.W) if action.op is Op.BW else (action.op,):
            self._next[action.stage, op] += 1


def _is_ordered(action: Action, sharing: Collection[int]) -> bool:
    return action.op in (Op.W, Op.BW) and action.stage in sharing


def most_held(timetable: Timetable) -> Counter[tuple[str, int]]:
    """{(saved or deferred, stage): the most microbatches whose value the stage holds at a time}."""
    most, held = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for row in timetable.rows:
        for action in row:
            _count(action, held)
            most |= held
    return most


def _count(action: Action, held: Counter[tuple[str, int]]) -> None:
    """Change the numbers of values that are held as the action does."""
    for value in consumes(action):
        if value.name in ("saved", "deferred"):
            held[value.name, value.stage] -= 1
    for name in {Op.F: ("saved",), Op.B: ("deferred",)}.get(action.op, ()):
        held[name, action.stage] += 1

"""The bytes that each rank holds over a step, predicted from the bytes of its stages. Pure arithmetic.

    weights     compute weights and module buffers; of shards also what is gathered from them
    gradients   `.grad`, or the float32 `main_grad` of a mixed precision
    optimizer   its states, and the float32 masters of a mixed precision
    saved       what F keeps for B, but for messages
    deferred    what B keeps for W, but for messages
    buffers     the batch, receive buffers, what is being sent, what passes between stages of one rank

`predict_memory` runs each rank's program without tensors, adding and subtracting these. A level is what is
held after an action; `during` adds what the action itself needs for a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from zbpp.schedule.dataflow import Value, produces
from zbpp.schedule.lower import Program, Recv, Reduce, Release, lower
from zbpp.schedule.timetable import Action, Op, PlanError, Timetable

COMPONENTS = ("weights", "gradients", "optimizer", "saved", "deferred", "buffers")
_WEIGHTS, _GRADIENTS, _OPTIMIZER, _SAVED, _DEFERRED, _BUFFERS = range(len(COMPONENTS))

Levels = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """The bytes of one stage. Per microbatch unless said otherwise.

    Held all the time: weights, optimizer. From the first W of a step: gradients, or all the time if
    keeps_gradients. gathered: the whole weights of shards, from the first F of a step; 0 without shards.
    reduced: what is left of the gradients after their reduction; None: all.
    saved, deferred: without messages. x, g: the received input, and the received gradient of the output.
    x_until, g_until: the op after which nothing refers to them any more. sent_x, sent_g: the output and the
    input's gradient, as far as the stage itself doesn't keep them. rises: what an op needs above the level
    before it, at most. update: what the optimizer needs above its states, for a while.
    """

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    saved: float = 0.0
    deferred: float = 0.0
    x: float = 0.0
    g: float = 0.0
    sent_x: float = 0.0
    sent_g: float = 0.0
    x_until: Op = Op.B
    g_until: Op = Op.B
    gathered: float = 0.0
    reduced: float | None = None
    keeps_gradients: bool = False
    rises: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # by Op
    update: float = 0.0

    @property
    def static(self) -> float:
        """Bytes that are there whatever the schedule is: weights, gradients and the optimizer's."""
        return self.weights + self.gathered + self.gradients + self.optimizer


@dataclass(frozen=True, eq=False)
class RankMemory:
    """One rank's predicted step.

    levels: [actions + 1, components]; the first row is the level before the first action. during: the most
    while each action runs. update: the most while the optimizer runs.
    """

    rank: int
    stages: tuple[int, ...]
    actions: tuple[Action, ...]
    levels: Levels
    during: Levels
    update: float

    @property
    def totals(self) -> Levels:
        """The level before the first action, then after each action."""
        return np.asarray(self.levels.sum(axis=1))

    @property
    def peak(self) -> float:
        """The most that the rank holds at any time of a step."""
        return float(max(self.during.max(initial=0), self.totals.max(), self.update))

    @property
    def peak_at(self) -> str:
        """When the most is held: the text of an action, or `the update`."""
        at = int(self.during.argmax())
        is_update = self.update >= max(self.during[at], self.totals.max())
        return "the update" if is_update else str(self.actions[at])

    @property
    def at_peak(self) -> dict[str, float]:
        """The components of the level after the action of the peak, and as `temporary` what it needed above.

        The level before the action, if that is higher.
        """
        if self.peak_at == "the update":
            level, most = self.levels[-1], self.update
        else:
            at = int(self.during.argmax())
            before, after = self.levels[at], self.levels[at + 1]
            level, most = (after if after.sum() >= before.sum() else before), self.during[at]
        found = dict(zip(COMPONENTS, map(float, level), strict=True))
        return {**found, "temporary": max(0.0, float(most - level.sum()))}


def predict_memory(
    timetable: Timetable, stages: Sequence[StageBytes], inputs: float = 0.0, target: float = 0.0
) -> list[RankMemory]:
    """Each rank's memory over a step of the steady state: optimizer states and receive buffers exist.

    stages: one per stage. inputs, target: bytes of the whole batch, which the ranks with stage 0 and with the
    last stage hold.
    Raises PlanError for another number of stages.
    """
    if len(stages) != timetable.num_stages:
        raise PlanError(f"{len(stages)} stages were measured, the timetable has {timetable.num_stages}")
    batch = {0: inputs}
    batch[timetable.num_stages - 1] = batch.get(timetable.num_stages - 1, 0.0) + target
    return [_RankRun(timetable, program, stages, batch).run() for program in lower(timetable)]


class _RankRun:
    """One rank's program, run on bytes."""

    def __init__(
        self,
        timetable: Timetable,
        program: Program,
        stages: Sequence[StageBytes],
        batch: Mapping[int, float],
    ) -> None:
        self._program, self._stages = program, stages
        self._num_stages, self._rank_of = timetable.num_stages, timetable.rank_of
        self._own = timetable.stages_of(program.rank)
        self._level = np.zeros(len(COMPONENTS))
        self._has_gradients: set[int] = set()
        self._is_gathered: set[int] = set()
        self._free_after: dict[tuple[int, int, Op], float] = {}  # stage, microbatch, op -> bytes of messages
        self._in_flight: dict[Value, float] = {}  # sent, not released
        own_batch = sum(batch.get(stage, 0.0) for stage in self._own)
        self._level[_BUFFERS] = _pool(program, stages) + own_batch

    def run(self) -> RankMemory:
        for stage in self._own:
            each = self._stages[stage]
            self._level[_WEIGHTS] += each.weights
            self._level[_OPTIMIZER] += each.optimizer
            self._level[_GRADIENTS] += each.gradients if each.keeps_gradients else 0.0
        levels, during, actions = [self._level.copy()], [], []
        for instruction in self._program.instructions:
            match instruction:
                case Action():
                    before = self._level.sum()
                    self._run_action(instruction)
                    rise = self._stages[instruction.stage].rises[instruction.op]
                    actions.append(instruction)
                    levels.append(self._level.copy())
                    during.append(max(before + rise, before, self._level.sum()))
                case Release(value, _):
                    self._level[_BUFFERS] -= self._in_flight.pop(value, 0.0)
                case Reduce(stage):
                    self._reduce(stage)
        self._level[_BUFFERS] -= sum(self._in_flight.values())
        gathered = sum(self._stages[stage].gathered for stage in self._is_gathered)
        update = self._level.sum() - gathered + sum(self._stages[stage].update for stage in self._own)
        return RankMemory(
            self._program.rank, tuple(self._own), tuple(actions), np.array(levels), np.array(during), update
        )

    def _run_action(self, action: Action) -> None:
        stage, op, microbatch = action
        own, level = self._stages[stage], self._level
        if op == Op.F:
            level[_SAVED] += own.saved
            if stage not in self._is_gathered:
                self._is_gathered.add(stage)
                level[_WEIGHTS] += own.gathered
        if op in (Op.B, Op.BW):
            level[_SAVED] -= own.saved
        if op == Op.B:
            level[_DEFERRED] += own.deferred
        if op == Op.W:
            level[_DEFERRED] -= own.deferred
        if op in (Op.W, Op.BW) and stage not in self._has_gradients:
            self._has_gradients.add(stage)
            level[_GRADIENTS] += 0.0 if own.keeps_gradients else own.gradients
        for value in produces(action, self._num_stages):
            self._keep(value, own)
        for ended in (Op.B, Op.W) if op == Op.BW else (op,):
            level[_BUFFERS] -= self._free_after.pop((stage, microbatch, ended), 0.0)

    def _keep(self, value: Value, producer: StageBytes) -> None:
        """A message was made: it is held until its Release or, on this rank, until its consumer's end."""
        if value.name not in ("x", "g") or (value.stage == self._num_stages - 1 and value.name == "g"):
            return
        size = producer.sent_x if value.name == "x" else producer.sent_g
        self._level[_BUFFERS] += size
        if self._rank_of[value.stage] != self._program.rank:
            self._in_flight[value] = size
            return
        consumer = self._stages[value.stage]
        until = consumer.x_until if value.name == "x" else consumer.g_until
        freed = value.stage, value.microbatch, until
        self._free_after[freed] = self._free_after.get(freed, 0.0) + size

    def _reduce(self, stage: int) -> None:
        own = self._stages[stage]
        if own.reduced is not None:
            self._level[_GRADIENTS] += own.reduced - own.gradients


def _pool(program: Program, stages: Sequence[StageBytes]) -> float:
    """The bytes of a rank's receive buffers: as many of each kind as are in use at once.

    A buffer is in use from the post of its receive, which happens ahead, until its message's last reader.
    """
    waiting = {peer: iter(values) for peer, values in _received(program).items()}
    in_use, most = Counter[tuple[str, float]](), Counter[tuple[str, float]]()
    ends: dict[tuple[int, int, Op], list[tuple[str, float]]] = {}

    def post(peer: int) -> None:
        value = next(waiting[peer], None)
        if value is None:
            return
        own = stages[value.stage]
        kind = (value.name, own.x if value.name == "x" else own.g)
        in_use[kind] += 1
        most[kind] = max(most[kind], in_use[kind])
        until = own.x_until if value.name == "x" else own.g_until
        ends.setdefault((value.stage, value.microbatch, until), []).append(kind)

    for peer in waiting:
        for _ in range(max(program.in_flight[peer], 1)):
            post(peer)
    for instruction in program.instructions:
        match instruction:
            case Recv(_, peer):
                post(peer)
            case Action(stage, op, microbatch):
                for ended in (Op.B, Op.W) if op == Op.BW else (op,):
                    in_use.subtract(ends.pop((stage, microbatch, ended), []))
    return sum(size * count for (_, size), count in most.items())


def _received(program: Program) -> dict[int, list[Value]]:
    found: dict[int, list[Value]] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Recv):
            found.setdefault(instruction.peer, []).append(instruction.value)
    return found


# ---------------------------------------------------------------- shards


def sharded(
    stage: StageBytes, *, weights: float, gradients: float, optimizer: float, gathered: float, block: float
) -> StageBytes:
    """The stage with its weights cut into shards; weights, gradients, optimizer: a shard's bytes.

    gathered: the whole weights, as they compute, while a step runs. block: of the largest block; where
    `gathered` is 0, weights are gathered block by block, two at a time at most: this one and the next.
    """
    extra = 2 * block if not gathered else 0.0
    f, b, w, whole = stage.rises
    return replace(
        stage,
        weights=weights,
        optimizer=optimizer,
        gathered=gathered,
        reduced=gradients,
        keeps_gradients=False,
        rises=(f + extra, b + extra, w, whole + extra),
    )


# ---------------------------------------------------------------- what fits


def excess(ranks: Sequence[RankMemory], limits: Sequence[float]) -> dict[int, float]:
    """{rank: bytes above its limit}, for the ranks that don't fit."""
    pairs = zip(ranks, limits, strict=True)
    return {each.rank: each.peak - limit for each, limit in pairs if each.peak > limit}

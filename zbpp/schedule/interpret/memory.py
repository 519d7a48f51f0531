"""The bytes that each rank holds over a step, predicted from the bytes of its stages. Pure arithmetic.

    weights     weights in the compute dtype and module buffers; with shards, also the gathered weights
    gradients   `.grad`, or the float32 `main_grad` of a mixed precision
    optimizer   the optimizer's states, and the float32 masters of a mixed precision
    saved       the tensors that F keeps for B, and what slices of a sequence share; without messages
    deferred    the tensors that B keeps for W, without messages
    buffers     the batch, receive buffers, messages being sent, messages between two stages of one rank
    copies      post-validation's copies of weights and states, from the update to the next step's gate

`program_memory` runs a rank's program without tensors, and adds and subtracts these components. A level is
the bytes held after an action. `during` is the most from the begin of an action to the begin of the next: it
also counts the action's temporary memory, activations that come back from the host, and the update of a stage
that releases its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zbpp.schedule.dataflow import Value, produces
from zbpp.schedule.dataflow_arrays import changes_of_past
from zbpp.schedule.interpret.stage_bytes import MicrobatchBytes, StageBytes
from zbpp.schedule.passes.posts import fence_of, in_flight
from zbpp.schedule.program import (
    OnMessage,
    Post,
    Program,
    Recv,
    Reduce,
    Release,
    Send,
)
from zbpp.schedule.timetable import Action, Op
from zbpp.schedule.units import Unit

COMPONENTS = ("weights", "gradients", "optimizer", "saved", "deferred", "buffers", "copies")
_WEIGHTS, _GRADIENTS, _OPTIMIZER, _SAVED, _DEFERRED, _BUFFERS, _COPIES = range(len(COMPONENTS))

Levels = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RankMemory:
    """One rank's predicted step, in bytes.

    levels: [actions + 1, components]; row 0 is the level before the first action, row i + 1 the level after
    action i. during: for each action, the most from its begin to the next action's begin. at_update: the
    level when the optimizer runs at the end of the step. update: the most meanwhile. host: the most in host
    memory: offloaded weights, gradients and states, and offloaded activations.
    """

    rank: int
    stages: tuple[int, ...]
    actions: tuple[Action, ...]
    levels: Levels
    during: Levels
    at_update: Levels
    update: float
    host: float = 0.0

    @property
    def totals(self) -> Levels:
        """The sum of the components before the first action, and after each action."""
        return np.asarray(self.levels.sum(axis=1))

    @property
    def peak(self) -> float:
        """The most bytes that the rank holds at any time of the step."""
        return float(max(self.during.max(initial=0), self.totals.max(), self.update))

    @property
    def peak_at(self) -> str:
        """When the rank holds the most: an action, such as `0B3`, or `the update`."""
        at = int(self.during.argmax())
        is_update = self.update >= max(self.during[at], self.totals.max())
        return "the update" if is_update else str(self.actions[at])

    @property
    def at_peak(self) -> dict[str, float]:
        """The components at the peak, and the bytes above their sum as `temporary`.

        The components are those of the level before or after the action of the peak, whichever is higher.
        """
        if self.peak_at == "the update":
            level, most = self.at_update, self.update
        else:
            at = int(self.during.argmax())
            before, after = self.levels[at], self.levels[at + 1]
            level, most = (after if after.sum() >= before.sum() else before), self.during[at]
        found = dict(zip(COMPONENTS, map(float, level), strict=True))
        return {**found, "temporary": max(0.0, float(most - level.sum()))}


def program_memory(
    program: Program, stages: Sequence[StageBytes], inputs: float = 0.0, target: float = 0.0
) -> RankMemory:
    """A rank's memory over a step that is not the first: optimizer states and receive buffers exist.

    program: with the instructions of its features. In a program with a fence, which may be run again, the
    previous step's gradients, and the copies made before its update, stay until an instruction drops them;
    its batch stays until the step's end.
    stages: the bytes of every stage of the pipeline. inputs, target: the bytes of the whole batch, which the
    rank with stage 0 and the rank with the last stage hold.
    """
    return RankBytes(program, stages, inputs, target).run()


class RankBytes:
    """Runs one rank's program on bytes. Instructions of features change them by the public methods."""

    def __init__(self, program: Program, stages: Sequence[StageBytes], inputs: float, target: float) -> None:
        self._program, self.stages = program, stages
        self._num_stages, self._keeps_last_step = len(stages), fence_of(program) is not None
        actions = [each for each in program.instructions if isinstance(each, Action)]
        self._own = sorted({each.stage for each in actions})
        self._sent = {each.value for each in program.instructions if isinstance(each, Send)}
        self._received = {each.value for each in program.instructions if isinstance(each, Recv)}
        self._level = np.zeros(len(COMPONENTS))
        self._has_gradients: set[int] = set()
        self._is_gathered: set[int] = set()
        # {(stage, microbatch, op): bytes of messages that are freed after this action}
        self._free_after: dict[tuple[int, int, Op], float] = {}
        self._in_flight: dict[Value, float] = {}  # bytes of messages that are sent and not released yet
        self._host = self._most_on_host = 0.0
        self._during: list[float] = []
        own_batch = inputs * (0 in self._own) + target * (self._num_stages - 1 in self._own)
        num_batches = 2 if self._keeps_last_step else 1  # that of the step before may have to run again
        self._level[_BUFFERS] = pool_bytes(program, stages) + num_batches * own_batch

    def run(self) -> RankMemory:
        self._begin()
        levels, actions = list[Levels](), list[Action]()
        for instruction in self._program.instructions:
            if isinstance(instruction, Action):
                before = self._level.sum()
                if not actions:
                    levels = [self._level.copy()]
                self._run_action(instruction)
                actions.append(instruction)
                levels.append(self._level.copy())
                rise = self.stages[instruction.stage].of(instruction.microbatch).rises[instruction.op]
                self._during.append(max(before + rise, before, self._level.sum()))
                continue
            match instruction:
                case Release(value, _):
                    self._level[_BUFFERS] -= self._in_flight.pop(value, 0.0)
                case Reduce(stage):
                    self._reduce(stage)
                    if self.stages[stage].block:  # offloaded weights' gradients leave within the last W
                        levels[-1] = self._level.copy()
                case _ if hasattr(instruction, "change_bytes"):
                    instruction.change_bytes(self)
            if self._during:
                self._during[-1] = max(self._during[-1], self._level.sum())
        self._level[_BUFFERS] -= sum(self._in_flight.values())
        self._level[_WEIGHTS] -= sum(self.stages[stage].gathered for stage in self._is_gathered)
        self._level[_COPIES] = self._num_copied
        update = self._level.sum() + self._updated_last()
        during = np.array(self._during)
        return RankMemory(
            self._program.rank,
            tuple(self._own),
            tuple(actions),
            np.array(levels),
            during,
            self._level,
            update,
            self._most_on_host,
        )

    def _begin(self) -> None:
        """Set the level before the first action."""
        own = [self.stages[stage] for stage in self._own]
        for each in own:
            self._level[_WEIGHTS] += each.weights
            self._level[_OPTIMIZER] += each.optimizer
            self._level[_GRADIENTS] += each.gradients if each.keeps_gradients else 0.0
            self._host += each.host
        self._level[_WEIGHTS] += 2 * max(each.block for each in own)
        self._most_on_host = self._host
        self._old_gradients = 0.0
        self._num_copied = sum(each.copies for each in own) if self._keeps_last_step else 0.0
        if self._keeps_last_step:
            self._level[_COPIES] = self._num_copied
            self._old_gradients = sum(_left_gradients(each) for each in own)
            self._level[_GRADIENTS] += self._old_gradients

    def _updated_last(self) -> float:
        """The optimizer's temporary bytes at the end of a step: for all stages together or one by one."""
        own = [self.stages[stage] for stage in self._own]
        together = sum(each.update for each in own if not each.releases)
        alone = [each.update for each in own if each.releases and each.reduced is not None]
        return max([together, *alone])

    def saved(self, change: float) -> None:
        """What F's have kept on the device grows by so many bytes."""
        self._level[_SAVED] += change

    def on_host(self, change: float) -> None:
        """What lies in host memory grows by so many bytes."""
        self._host += change
        self._most_on_host = max(self._most_on_host, self._host)

    def drop_last_step(self) -> None:
        """The gradients and the copies of the step before are free."""
        self._level[_GRADIENTS] -= self._old_gradients
        self._level[_COPIES] = 0.0

    def _run_action(self, action: Action) -> None:
        stage, op, microbatch = action
        own, unit, level = self.stages[stage], self.stages[stage].of(microbatch), self._level
        level[_SAVED] += _change_of_past(action, own)
        if op == Op.F:
            level[_SAVED] += unit.saved
            if stage not in self._is_gathered:
                self._is_gathered.add(stage)
                level[_WEIGHTS] += own.gathered
        if op in (Op.B, Op.BW):
            level[_SAVED] -= unit.saved
        if op == Op.B:
            level[_DEFERRED] += unit.deferred
        if op == Op.W:
            level[_DEFERRED] -= unit.deferred
        if op in (Op.W, Op.BW) and stage not in self._has_gradients:
            self._has_gradients.add(stage)
            level[_GRADIENTS] += 0.0 if own.keeps_gradients else own.gradients
        for value in produces(action, self._num_stages):
            self._keep(value, unit)
        for ended in (Op.B, Op.W) if op == Op.BW else (op,):
            level[_BUFFERS] -= self._free_after.pop((stage, microbatch, ended), 0.0)

    def _keep(self, value: Value, producer: MicrobatchBytes) -> None:
        """Count a message that an action has produced.

        A message to another rank is held until its Release; one to a stage of this rank until that stage no
        longer needs it.
        """
        if value.name not in ("x", "g") or (value.stage == self._num_stages - 1 and value.name == "g"):
            return
        size = producer.sent_x if value.name == "x" else producer.sent_g
        self._level[_BUFFERS] += size
        if value in self._sent:
            self._in_flight[value] = size
            return
        self._free_later(value, size)

    def _free_later(self, value: Value, size: float) -> None:
        """Note that so many bytes of a message are free when its stage no longer needs it."""
        _, until = self._consumer(value).received(value.name)
        freed = value.stage, value.microbatch, until
        self._free_after[freed] = self._free_after.get(freed, 0.0) + size

    def _consumer(self, value: Value) -> MicrobatchBytes:
        return self.stages[value.stage].of(value.microbatch)

    def put_on_way(self, value: Value, made: float) -> None:
        """A message takes the form that it has on its way. made: its bytes before (sent_x or sent_g)."""
        size = self._consumer(value).on_way(value.name)
        if size is None:
            return
        self._during[-1] = max(self._during[-1], self._level.sum() + size)
        self._level[_BUFFERS] += size - made
        if value in self._sent:
            self._in_flight[value] = size
        else:
            self._free_later(value, -made)

    def take_from_way(self, value: Value) -> None:
        """A message takes the form in which its stage wants it; the one of its way is free."""
        consumer = self._consumer(value)
        (size, _), on_way = consumer.received(value.name), consumer.on_way(value.name)
        if on_way is None:
            return
        self._level[_BUFFERS] += size
        self._free_later(value, size)
        if value not in self._received:
            self._during[-1] = max(self._during[-1], self._level.sum())
            self._level[_BUFFERS] -= on_way

    def _reduce(self, stage: int) -> None:
        own = self.stages[stage]
        if own.reduced is not None:
            self._level[_GRADIENTS] += own.reduced - own.gradients
        elif own.block:
            self.release(stage)

    def release(self, stage: int) -> None:
        """Count the bytes of an update or an accumulation of a stage, which then drops its gradients."""
        own = self.stages[stage]
        if stage in self._has_gradients:  # on the device
            self._during[-1] = max(self._during[-1], self._level.sum() + own.update)
            self._level[_GRADIENTS] -= own.gradients
            self._has_gradients.discard(stage)


def _change_of_past(action: Action, stage: StageBytes) -> float:
    """What an action on a slice adds to the bytes of keys, values and their gradients."""
    unit = action.microbatch
    if not isinstance(unit, Unit):
        return 0.0
    past, gradients = changes_of_past(action.op, unit.slice, unit.num_slices)
    return float(stage.past * past + stage.past_gradients * gradients)


def _left_gradients(stage: StageBytes) -> float:
    """The bytes of a stage's gradients that outlive a step, and that the next step drops."""
    if stage.keeps_gradients or stage.releases:
        return 0.0
    return stage.gradients if stage.reduced is None else stage.reduced


# ---------------------------------------------------------------- limits


def excess(ranks: Sequence[RankMemory], limits: Sequence[float]) -> dict[int, float]:
    """{rank: bytes above its limit}, for the ranks whose peak is above their limit."""
    pairs = zip(ranks, limits, strict=True)
    return {each.rank: each.peak - limit for each, limit in pairs if each.peak > limit}


def pool_bytes(program: Program, stages: Sequence[StageBytes]) -> float:
    """The bytes of the receive buffers of a program: the most that are in use at once.

    A buffer is in use from when its receive starts, which is ahead of the message, until the last action that
    reads the message, or until the message takes another form. On NCCL receives start later than here (see
    posts.py).
    """
    in_use = most = 0.0
    ends, on_way = dict[tuple[int, int, Op], float](), dict[Value, float]()

    for instruction in in_flight(program).instructions:
        match instruction:
            case Post(value, _):
                own = stages[value.stage].of(value.microbatch)
                size, until = own.received(value.name)
                if (size_on_way := own.on_way(value.name)) is None:
                    key = value.stage, value.microbatch, until
                    ends[key] = ends.get(key, 0.0) + size
                else:
                    size = on_way[value] = size_on_way
                in_use += size
                most = max(most, in_use)
            case OnMessage(value):
                in_use -= on_way.pop(value, 0.0)
            case Action(stage, op, microbatch):
                for ended in (Op.B, Op.W) if op == Op.BW else (op,):
                    in_use -= ends.pop((stage, microbatch, ended), 0.0)
    return most

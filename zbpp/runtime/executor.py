"""One rank's program: resolved once into functions, which every step calls in turn.

A message is an x or a g, as a tuple of tensors, even if it stays on its rank. An instruction takes at most
one message and gives at most one. A message waits in a slot, from the instruction that gives it to the
instruction that takes it. Resolved, an instruction is a triple: a function
of one message; the slot that the message comes from; the slot that the result goes to. So a step looks
nothing up and decides nothing (the dot stands for the message):

    instruction          function                      takes from -> gives to
    0F0                  worker.forward(0, .)          slot 0 -> slot 2
    Send x(1,0) to 1     outbox.send(("x", 1), .)      slot 2 -> slot 1
    Recv g(0,0) from 1   inbox.receive()               slot 0 -> slot 3
    0B0                  worker.backward_input(0, .)   slot 3 -> slot 1
    0W0                  worker.backward_weight(0, .)  slot 0 -> slot 1

Slot 0 is always empty: an instruction without a message takes from it. Slot 1 is never read: a result that
no instruction takes goes there.

A pass with a gate (zbpp/schedule/gate.py) runs another list of the same functions, with the gate at its
place. If the F's before the gate are not valid, the gate ends the pass by BeginAgain; `drop_messages` then
empties the links, and the program can be run from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from zbpp.runtime.boxes import Links, channel_of, make_inboxes, make_outboxes
from zbpp.runtime.check_counts import MessageChecks
from zbpp.runtime.checked_links import CheckedInbox
from zbpp.runtime.explain_instruction import explain
from zbpp.runtime.flight_recorder import FlightRecorder
from zbpp.runtime.layout import Message
from zbpp.runtime.measure import Recorder
from zbpp.runtime.offload import SavedOffload, StageOffload
from zbpp.runtime.p2p import BufferPool, FreshBuffers, Inbox, Outbox
from zbpp.runtime.reductions import Reductions
from zbpp.runtime.stage import StageWorker
from zbpp.runtime.world import communicating
from zbpp.schedule import Action, Gate, Op, Program, Recv, Reduce, Release, Send, Value, consumes, produces
from zbpp.schedule.lower import Instruction
from zbpp.schedule.offload import Await, Drop, Fetch, Offload

StageMethod = Callable[[StageWorker, int, Message], Message]  # int: the microbatch

_NO_MESSAGE: Message = ()
_EMPTY_SLOT, _UNREAD_SLOT, _FIRST_SLOT = 0, 1, 2  # messages wait in the slots from the first on


class _Resolved(NamedTuple):
    """An instruction as a function, with the slots of what it takes and gives."""

    function: Callable[[Message], Any]
    takes: int = _EMPTY_SLOT
    gives: int = _UNREAD_SLOT


class BeginAgain(Exception):
    """The F's of this pass were computed with weights that have changed since."""


class _Resolution(NamedTuple):
    """A program as functions. instructions: what each function was; None for what is no instruction.

    gate: the place of the gate; None without one.
    """

    functions: list[_Resolved]
    instructions: list[Instruction | None]
    gate: int | None = None


class Executor:
    """Runs one program over the stages and links of one rank.

    methods: {op: the method of StageWorker that does it}. reductions: of the stages' gradients; None where
    the program has none. gate: makes the program's gate, when it is needed first. offloads: what may leave,
    by the value's name and the stage. flight: where to note when each instruction begins. check_messages:
    gives messages checksums; None: no checksums.
    """

    def __init__(
        self,
        program: Program,
        workers: Mapping[int, StageWorker],
        methods: Mapping[Op, StageMethod],
        num_stages: int,
        links: Links,
        device: torch.device,
        *,
        dynamic_shapes: bool = False,
        reductions: Reductions | None = None,
        gate: Callable[[], Gate] | None = None,
        offloads: Mapping[tuple[str, int], StageOffload[Any]] = MappingProxyType({}),
        flight: FlightRecorder | None = None,
        check_messages: MessageChecks | None = None,
    ) -> None:
        self._program, self._workers, self._methods = program, workers, methods
        self._reductions, self._offloads = reductions, offloads
        self._recorder: Recorder | None = None
        self._flight = FlightRecorder(program.rank) if flight is None else flight
        self._num_stages = num_stages
        self._pool = FreshBuffers(device) if dynamic_shapes else BufferPool(device)
        self._inboxes = make_inboxes(
            program, links, self._pool, check_messages, dynamic_shapes=dynamic_shapes
        )
        self._outboxes = make_outboxes(program, links, device, check_messages, dynamic_shapes=dynamic_shapes)
        taken = [value for instruction in program.instructions for value in _taken(instruction)]
        self._slots = dict(zip(taken, count(_FIRST_SLOT)))  # where each value waits
        self._make_gate = gate
        self._is_valid: Callable[[], bool] = _is_always_valid
        self._is_named = False
        self._replaced: Mapping[Action, Callable[[Message], Any]] = {}
        self.resolve(program)

    def resolve(self, program: Program) -> None:
        """Run this program from now on: with the same actions and messages, but another offload."""
        self._program = program
        leaving = {each.value for each in program.instructions if isinstance(each, Offload)}
        self._leaving = {value for value in leaving if value.name == SavedOffload.name}
        self._plain = self._resolution()
        self._gate, self._gated = Gate(0, {}, ()), _Resolution([], [])  # made when they are needed first

    def replace_actions(
        self, functions: Mapping[Action, Callable[[Message], Any]], pools: Mapping[int, BufferPool]
    ) -> None:
        """From now on run these functions in the place of actions; {}: the actions again.

        pools: by sender, where messages are received; without one, in the executor's own pool. Not to be
        called during a run.
        """
        self._replaced = functions
        for peer, inbox in self._inboxes.items():
            inbox.pool = pools.get(peer, self._pool)
        self.resolve(self._program)

    @property
    def program(self) -> Program:
        """What `run` runs."""
        return self._program

    @property
    def device(self) -> torch.device:
        """Where messages are."""
        return self._pool.device

    def note_captured(self) -> None:
        """Note that the program runs as one graph: where it stands inside can't be known."""
        self._flight.begin_captured()

    def name_actions(self, is_named: bool) -> None:
        """From now on, let torch's profiler see each instruction by its text (`2F5`), or no longer."""
        self._is_named = is_named
        self.resolve(self._program)

    def run(self, recorder: Recorder | None = None, *, is_valid: Callable[[], bool] | None = None) -> None:
        """Run the program once. Afterwards slots and links are empty.

        is_valid: called at the program's gate; says whether the F's before the gate are valid. Raises
        BeginAgain if they aren't. None: the program has no gate.
        Raises what a stage raises; where a message fails, CommunicationError with the rank, the instruction
        and its number, the value and the peer; ValueError for a message whose layout has changed.
        """
        resolution = self._plain if is_valid is None else self._with_gate(is_valid)
        mark = None if recorder is None else recorder.begin(resolution.instructions)
        self._recorder = recorder
        note, clock = self._flight.begin(resolution.instructions), monotonic
        slots = [_NO_MESSAGE] * (_FIRST_SLOT + len(self._slots))
        position = 0
        try:
            for position, (function, takes, gives) in enumerate(resolution.functions):  # noqa: B007  # for explain
                # The slot is emptied, so that a message's memory is free as soon as no stage needs it.
                message, slots[takes] = slots[takes], _NO_MESSAGE
                note(clock())
                if mark:
                    mark()
                slots[gives] = function(message)
                if mark:
                    mark()
        except BeginAgain:
            raise
        except Exception as error:
            at_gate, rank = position == resolution.gate, self._program.rank
            explain(error, resolution.instructions, position, rank, self._flight.process, at_gate=at_gate)
            raise
        finally:
            self._is_valid = _is_always_valid
        if any(slots[_FIRST_SLOT:]):
            left = [str(value) for value, slot in self._slots.items() if slots[slot]]
            raise RuntimeError(f"a call ended with values left over: {', '.join(left)}")

    def drop_messages(self) -> None:
        """Empty the links after BeginAgain: receive what other ranks have sent before their gates."""
        rank = self._program.rank
        with communicating(f"rank {rank}, dropping the messages of a step that begins again"):
            for sender in self._gate.dropped:
                self._inboxes[sender].receive()
            for outbox in self._outboxes.values():
                outbox.finish()

    def forget_layouts(self) -> None:
        """Let shapes change: each channel's next message has a header again, and old receive buffers go."""
        self._pool.clear()
        for box in self._boxes():
            box.layouts.clear()

    def receive_buffers(self) -> list[torch.Tensor]:
        """The pool's buffers."""
        return self._pool.buffers()

    def close(self) -> None:
        """Give up all messages under way, and the links."""
        for box in self._boxes():
            box.close()

    def _boxes(self) -> Iterator[Inbox | Outbox]:
        yield from self._inboxes.values()
        yield from self._outboxes.values()

    def _resolution(self, gate: Gate | None = None) -> _Resolution:
        """The functions of a pass: those before the program, the program, those after it."""
        program, place = self._program.instructions, 0
        first: list[Callable[[], Any]] = []
        for peer, inbox in self._inboxes.items():
            first.append(inbox.begin if gate is None else partial(inbox.begin, gate.sent[peer]))
        at_gate: list[Callable[[], Any]] = []
        last: list[Callable[[], Any]] = [outbox.finish for outbox in self._outboxes.values()]
        last += [each.verify for each in self._inboxes.values() if isinstance(each, CheckedInbox)]
        if gate is not None:
            place = _place_of(gate, program)
            at_gate.append(self._pass_gate)
        if self._reductions is not None:
            first.append(self._reductions.begin)
            at_gate.append(self._reductions.begin_gradients)
            last.append(self._reductions.finish)
        functions, instructions = list[_Resolved](), list[Instruction | None]()
        for work, part in ((first, program[:place]), (at_gate, program[place:]), (last, ())):
            functions += [_Resolved(_without_message(each)) for each in work]
            functions += map(self._named if self._is_named else self._resolve, part)
            instructions += [*[None] * len(work), *part]
        return _Resolution(functions, instructions, None if gate is None else len(first) + place)

    def _with_gate(self, is_valid: Callable[[], bool]) -> _Resolution:
        """The program with its gate, which is resolved when it is needed first."""
        if not self._gated.functions:
            assert self._make_gate is not None  # only a program with backwards is run with a gate
            self._gate = self._make_gate()
            self._gated = self._resolution(self._gate)
        self._is_valid = is_valid
        return self._gated

    def _pass_gate(self) -> None:
        if not self._is_valid():
            raise BeginAgain
        for inbox in self._inboxes.values():
            inbox.open()

    def _resolve(self, instruction: Instruction) -> _Resolved:
        match instruction:
            case Action(stage, op, microbatch):
                takes = [self._slots[value] for value in _taken(instruction)]
                made = produces(instruction, self._num_stages)
                gives = [self._slots[value] for value in made if value in self._slots]
                function: Callable[[Message], Any]
                function = partial(self._methods[op], self._workers[stage], microbatch)
                if any(value in self._leaving for value in made):
                    function = partial(self._saved(stage).forward, microbatch)
                function = self._replaced.get(instruction, function)
                return _Resolved(function, *(takes or [_EMPTY_SLOT]), *(gives or [_UNREAD_SLOT]))
            case Recv(value, peer):
                return _Resolved(_without_message(self._inboxes[peer].receive), gives=self._slots[value])
            case Send(value, peer):
                send = partial(self._outboxes[peer].send, channel_of(value))
                return _Resolved(send, takes=self._slots[value])
            case Release(_, peer):
                return _Resolved(_without_message(self._outboxes[peer].release))
            case Reduce(stage):
                return _Resolved(_without_message(partial(self._reduce, stage)))
            case Offload(value) | Fetch(value):
                return _Resolved(_without_message(partial(self._start_copy, instruction)))
            case Drop(value):
                return _Resolved(_without_message(partial(self._offload_of(value).drop, value.microbatch)))
            case Await(value):
                return _Resolved(_without_message(partial(self._offload_of(value).wait, value.microbatch)))

    def _saved(self, stage: int) -> SavedOffload:
        found = self._offloads[SavedOffload.name, stage]
        assert isinstance(found, SavedOffload)
        return found

    def _offload_of(self, value: Value) -> StageOffload[Any]:
        return self._offloads[value.name, value.stage]

    def _start_copy(self, instruction: Offload | Fetch) -> None:
        """Start to copy a value; the recorder is told when the copy runs."""
        value, is_out = instruction.value, isinstance(instruction, Offload)
        offload = self._offload_of(value)
        watch = None if self._recorder is None else self._recorder.copy(value, is_out=is_out)
        (offload.offload if is_out else offload.fetch)(value.microbatch, watch)

    def _named(self, instruction: Instruction) -> _Resolved:
        """The instruction, resolved, with its text as a range of the profiler."""
        resolved, name = self._resolve(instruction), str(instruction)

        def function(message: Message) -> Any:
            with record_function(name):
                return resolved.function(message)

        return resolved._replace(function=function)

    def _reduce(self, stage: int) -> None:
        """Start the reduction of a stage's gradients; the recorder is told when it has ended."""
        if self._reductions is None:
            return
        if self._reductions.reduces(stage):
            ended = None if self._recorder is None else self._recorder.reduction(stage)
            self._reductions.start(stage, ended)
        else:
            self._reductions.complete(stage)


def _is_always_valid() -> bool:
    return True


def _place_of(gate: Gate, instructions: Sequence[Instruction]) -> int:
    """The number of instructions before the gate: it stands before what the action behind it waits for."""
    actions = [place for place, each in enumerate(instructions) if isinstance(each, Action)]
    if gate.position == len(actions):
        return len(instructions)
    place = actions[gate.position]
    while place and isinstance(instructions[place - 1], Recv | Offload | Drop | Fetch | Await):
        place -= 1
    return place


def _taken(instruction: Instruction) -> tuple[Value, ...]:
    """The messages (x or g) that an instruction takes; saved and deferred stay inside their StageWorker."""
    match instruction:
        case Action():
            return tuple(value for value in consumes(instruction) if value.name in ("x", "g"))
        case Send(value, _):
            return (value,)
        case _:
            return ()


def _without_message(function: Callable[[], Any]) -> Callable[[Message], Any]:
    return lambda _: function()

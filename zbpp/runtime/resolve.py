"""A program's instructions as functions: found once, so that a step looks nothing up and decides nothing.

A message is an x or a g, as a tuple of tensors, even if it stays on its rank. An instruction takes at most
one message and gives at most one. A message waits in a slot, from the instruction that gives it to the
instruction that takes it. Resolved, an instruction is a triple: a function of one message; the slot that the
message comes from; the slot that the result goes to (the dot stands for the message):

    instruction          function                      takes from -> gives to
    0F0                  worker.forward(0, .)          slot 0 -> slot 2
    Send x(1,0) to 1     outbox.send(x(1,0), .)        slot 2 -> slot 1
    Post g(0,0) from 1   inbox.post(g(0,0))            slot 0 -> slot 1
    Recv g(0,0) from 1   inbox.receive()               slot 0 -> slot 3
    0B0                  worker.backward_input(0, .)   slot 3 -> slot 1
    0W0                  worker.backward_weight(0, .)  slot 0 -> slot 1

Slot 0 is always empty: an instruction without a message takes from it. Slot 1 is never read: a result that
no instruction takes goes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from zbpp.runtime.extra import Extras
from zbpp.runtime.in_place import Handover
from zbpp.runtime.layout import Message, Run
from zbpp.runtime.layouts import channel_of
from zbpp.runtime.links import Inbox, Outbox
from zbpp.runtime.stage import StageWorker
from zbpp.schedule import (
    Action,
    Op,
    Post,
    Program,
    Recv,
    Release,
    Send,
    Value,
    consumes,
    produces,
)
from zbpp.schedule.program import Instruction, Update

StageMethod = Callable[[StageWorker, int, Message], Message]  # int: the microbatch

_NAMES = ("x", "g")  # of messages

EMPTY_SLOT, UNREAD_SLOT, FIRST_SLOT = 0, 1, 2  # messages wait in the slots from the first on


class _Messages(NamedTuple):
    """The messages that an action takes, and those that it makes."""

    taken: tuple[Value, ...]
    made: tuple[Value, ...]


class Resolved(NamedTuple):
    """The function of an instruction, with the slots that its message comes from and its result goes to."""

    function: Callable[[Message], Any]
    takes: int = EMPTY_SLOT
    gives: int = UNREAD_SLOT


_OF_AN_EXTRA = Resolved(lambda message: ())


class Resolution(NamedTuple):
    """A program as functions. instructions: of each function; None for the functions that end a pass."""

    functions: list[Resolved]
    instructions: list[Instruction | None]


class Resolver:
    """Finds the functions of one rank's instructions.

    workers: by stage. methods: {op: the method of StageWorker that does it}. inboxes, outboxes: by peer.
    extras: their handlers and functions run in calls of the kind `call`, see extra.py.

    slots: {value: the slot in which it waits}, for the values that instructions of `program` take.
    """

    def __init__(
        self,
        program: Program,
        workers: Mapping[int, StageWorker],
        methods: Mapping[Op, StageMethod],
        num_stages: int,
        inboxes: Mapping[int, Inbox],
        outboxes: Mapping[int, Outbox],
        extras: Extras,
        call: str,
    ) -> None:
        self._workers, self._methods, self._num_stages = workers, methods, num_stages
        self._inboxes, self._outboxes = inboxes, outboxes
        self._extras, self._call = extras, call
        self._sent = [each.value for each in program.instructions if isinstance(each, Send)]
        self._messages: dict[Action, _Messages] = {}
        taken = [value for each in program.instructions for value in self._taken(each)]
        self.slots = dict(zip(taken, count(FIRST_SLOT)))
        self._handovers = {value: Handover(channel_of(value)) for value in self._handed_over()}

    def resolution(self, program: Program) -> Resolution:
        """The functions of a program, and behind them one for each outbox, which ends its last sends."""
        functions, resolved = list[Resolved](), list[Instruction | None]()
        bind = self._extras.binder(self._call)
        for each in program.instructions:
            found = self._resolve(each)
            bound = bind(each, None if found is None else found.function)
            if bound is not None:
                function = self._guarded(each, bound)
                functions.append(Resolved(function, *(found or _OF_AN_EXTRA)[1:]))
                resolved.append(each)
        last = [Resolved(_without_message(outbox.finish)) for outbox in self._outboxes.values()]
        return Resolution([*functions, *last], [*resolved, *[None] * len(last)])

    def _resolve(self, instruction: Instruction) -> Resolved | None:
        """The function of an instruction that the core knows; None for one of an extra."""
        match instruction:
            case Action():
                return self._action(instruction)
            case Post(value, peer):
                return Resolved(_without_message(partial(self._inboxes[peer].post, value)))
            case Recv(value, peer):
                return Resolved(_without_message(self._inboxes[peer].receive), gives=self.slots[value])
            case Send(value, peer):
                send = partial(self._outboxes[peer].send, value)
                return Resolved(send, takes=self.slots[value])
            case Release(_, peer):
                return Resolved(_without_message(self._outboxes[peer].release))
            case _:
                return None

    def _of(self, action: Action) -> _Messages:
        """The messages of an action, found once."""
        found = self._messages.get(action)
        if found is None:
            # saved and deferred stay inside their StageWorker.
            taken = tuple([value for value in consumes(action) if value.name in _NAMES])
            made = tuple([value for value in produces(action, self._num_stages) if value.name in _NAMES])
            found = self._messages[action] = _Messages(taken, made)
        return found

    def _taken(self, instruction: Instruction) -> tuple[Value, ...]:
        """The messages that an instruction takes."""
        match instruction:
            case Action():
                return self._of(instruction).taken
            case Send(value, _):
                return (value,)
            case _:
                return ()

    def _handed_over(self) -> set[Value]:
        """The messages between two stages of this rank; the gradient of the loss stays in its stage."""
        made = {
            value
            for action, messages in self._messages.items()
            for value in messages.made
            if value.stage != action.stage
        }
        return {value for messages in self._messages.values() for value in messages.taken if value in made}

    def _guarded(self, instruction: Instruction, run: Run) -> Run:
        """`run`, wrapped so that messages are guarded against in-place changes, see in_place.py."""
        match instruction:
            case Action():
                return self._handing_over(instruction, run)
            case Update(stage):
                return self._updating(stage, run)
            case _:
                return run

    def _updating(self, stage: int, run: Run) -> Run:
        """`run`, which writes the weights of a stage, behind the check of the messages that carried them.

        The last gradient of a stage comes after all messages to it and to later stages have been received.
        """
        channels = {channel_of(value) for value in self._sent if value.stage >= stage}

        def update(message: Message) -> Message:
            for outbox in self._outboxes.values():
                outbox.release_received(channels)
            return run(message)

        return update

    def _handing_over(self, instruction: Action, run: Run) -> Run:
        """`run`, wrapped so that messages from and to other stages of this rank are guarded, see Handover."""
        messages = self._of(instruction)
        for value in messages.taken:
            if value in self._handovers:
                run = self._handovers[value].checked(run)
        for value in messages.made:
            if value in self._handovers and value.stage != instruction.stage:
                run = self._handovers[value].noted(run)
        return run

    def _action(self, action: Action) -> Resolved:
        messages = self._of(action)
        takes = [self.slots[value] for value in messages.taken]
        gives = [self.slots[value] for value in messages.made if value in self.slots]
        function = partial(self._methods[action.op], self._workers[action.stage], action.microbatch)
        return Resolved(function, *(takes or [EMPTY_SLOT]), *(gives or [UNREAD_SLOT]))


def _without_message(function: Callable[[], Any]) -> Callable[[Message], Any]:
    return lambda _: function()

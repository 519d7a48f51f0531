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
from zbpp.schedule.program import Instruction, OnMessage

StageMethod = Callable[[StageWorker, int, Message], Message]  # int: the microbatch

_NAMES = ("x", "g")  # of messages; saved and deferred stay inside their StageWorker

_WITH_MESSAGE = Action | OnMessage

EMPTY_SLOT, UNREAD_SLOT, FIRST_SLOT = 0, 1, 2  # messages wait in the slots from the first on


class _Messages(NamedTuple):
    """The message that an instruction takes, and the one that it gives; None: it takes, or gives, none."""

    taken: Value | None = None
    given: Value | None = None


_NO_MESSAGES = _Messages()


class Resolved(NamedTuple):
    """The function of an instruction, with the slots that its message comes from and its result goes to."""

    function: Callable[[Message], Any]
    takes: int = EMPTY_SLOT
    gives: int = UNREAD_SLOT


class Resolution(NamedTuple):
    """A program as functions.

    instructions: of each function; None for the functions that end a pass. slots: {value: the slot in which
    it waits}.
    """

    functions: list[Resolved]
    instructions: list[Instruction | None]
    slots: dict[Value, int]


class Resolver:
    """Finds the functions of one rank's instructions.

    workers: by stage. methods: {op: the method of StageWorker that does it}. inboxes, outboxes: by peer.
    extras: their handlers and functions run in calls of the kind `call`, see extra.py.
    """

    def __init__(
        self,
        workers: Mapping[int, StageWorker],
        methods: Mapping[Op, StageMethod],
        num_stages: int,
        inboxes: Mapping[int, Inbox],
        outboxes: Mapping[int, Outbox],
        extras: Extras,
        call: str,
    ) -> None:
        self._workers, self._methods = workers, methods
        self._inboxes, self._outboxes = inboxes, outboxes
        self._extras, self._call = extras, call
        self._receive = {peer: _without_message(inbox.receive) for peer, inbox in inboxes.items()}
        self._release = {peer: _without_message(outbox.release) for peer, outbox in outboxes.items()}
        # The table of the data flow is asked once per stage and op. All microbatches have the same messages.
        self._of_microbatch_0 = {
            (stage, op): _messages_of(Action(stage, op, 0), num_stages) for stage in workers for op in Op
        }

    def resolution(self, program: Program) -> Resolution:
        """The functions of a program, and behind them one for each outbox, which ends its last sends."""
        functions, resolved, handovers = list[Resolved](), list[Instruction | None](), dict[Value, Handover]()
        messages = [self._messages(each) for each in program.instructions]
        taken = dict.fromkeys(each.taken for each in messages if each.taken is not None)
        slots = dict(zip(taken, count(FIRST_SLOT)))
        bind = self._extras.binder(self._call)
        for each, own in zip(program.instructions, messages, strict=True):
            run = bind(each, self._function(each))
            if run is None:
                continue
            if isinstance(each, _WITH_MESSAGE):
                run = self._handing_over(each, own, run, handovers)
            takes = EMPTY_SLOT if own.taken is None else slots[own.taken]
            gives = UNREAD_SLOT if own.given is None else slots.get(own.given, UNREAD_SLOT)
            functions.append(Resolved(run, takes, gives))
            resolved.append(each)
        last = [Resolved(_without_message(outbox.finish)) for outbox in self._outboxes.values()]
        return Resolution([*functions, *last], [*resolved, *[None] * len(last)], slots)

    def _function(self, instruction: Instruction) -> Callable[[Message], Any] | None:
        """The function of an instruction that the core knows; None for one of an extra."""
        match instruction:
            case Action(stage, op, microbatch):
                return partial(self._methods[op], self._workers[stage], microbatch)
            case Post(value, peer):
                return _without_message(partial(self._inboxes[peer].post, value))
            case Recv(_, peer):
                return self._receive[peer]
            case Send(value, peer):
                return partial(self._outboxes[peer].send, value)
            case Release(_, peer):
                return self._release[peer]
            case _:
                return None

    def _messages(self, instruction: Instruction) -> _Messages:
        """The messages of an instruction."""
        match instruction:
            case Action(stage, op, microbatch):
                taken, given = self._of_microbatch_0[stage, op]
                return _Messages(
                    taken and Value(taken.name, taken.stage, microbatch),
                    given and Value(given.name, given.stage, microbatch),
                )
            case Send(value, _):
                return _Messages(taken=value)
            case Recv(value, _):
                return _Messages(given=value)
            case OnMessage(value):
                return _Messages(value, value)
            case _:
                return _NO_MESSAGES

    def _handing_over(
        self, at: Action | OnMessage, own: _Messages, run: Run, handovers: dict[Value, Handover]
    ) -> Run:
        """`run` of an instruction, with its messages between stages of this rank guarded, see Handover.

        handovers: of the instructions before this one; its own is added. F of the last stage gives the
        gradient of the loss to B of the same stage, through a slot. No other stage sees it, so it has none.
        """
        taken, given = own
        if taken in handovers:
            run = handovers[taken].checked(run)
        stays = isinstance(at, Action) and given is not None and given.stage == at.stage
        if given is not None and not stays and given.stage in self._workers:
            handovers[given] = Handover(channel_of(given))
            run = handovers[given].noted(run)
        return run


def _messages_of(action: Action, num_stages: int) -> _Messages:
    """The messages of an action, by the table of the data flow."""
    taken = [value for value in consumes(action) if value.name in _NAMES]
    given = [value for value in produces(action, num_stages) if value.name in _NAMES]
    return _Messages(taken[0] if taken else None, given[0] if given else None)


def _without_message(function: Callable[[], Any]) -> Callable[[Message], Any]:
    return lambda _: function()

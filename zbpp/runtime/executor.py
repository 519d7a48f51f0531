"""One rank's program, resolved once: what every step runs through.

Each instruction becomes a call of one message, and the numbers of two slots: where that message waits
and where the result goes. So a step looks nothing up and decides nothing:

    0F0                  worker.forward(0, .)         slot 0 -> slot 2
    Send x(1,0) to 1     outbox.send(("x", 1), .)     slot 2 -> slot 1
    Recv g(0,0) from 1   inbox.receive()              slot 0 -> slot 3
    0B0                  worker.backward_input(0, .)  slot 3 -> slot 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zbpp.runtime.layout import Message
from zbpp.runtime.measure import Recorder
from zbpp.runtime.p2p import BufferPool, FreshBuffers, Inbox, Outbox
from zbpp.runtime.stage import StageWorker
from zbpp.runtime.world import CommunicationError
from zbpp.schedule import Action, Op, Program, Recv, Release, Send, Value, consumes, produces
from zbpp.schedule.lower import Instruction

Work = Callable[[StageWorker, int, Message], Message]
Links = Mapping[tuple[int, int], dist.ProcessGroup]  # (sender, receiver) -> group

_NOTHING: Message = ()
# Slots: of calls that take nothing, of results that nobody takes, of messages from here on.
_EMPTY, _WASTE, _FIRST = 0, 1, 2


class _Call(NamedTuple):
    """An instruction, resolved."""

    work: Callable[[Message], Any]
    takes: int = _EMPTY
    gives: int = _WASTE


class Executor:
    """Runs one program over the stages and links of one rank.

    work: which method of a StageWorker does an op. `run` raises what a stage raises, and
    CommunicationError with rank, step of the program, value and peer where a message fails.
    """

    def __init__(
        self,
        program: Program,
        workers: Mapping[int, StageWorker],
        work: Mapping[Op, Work],
        num_stages: int,
        links: Links,
        device: torch.device,
        *,
        dynamic_shapes: bool = False,
    ) -> None:
        self._program, self._workers, self._work, self._num_stages = program, workers, work, num_stages
        self._pool = FreshBuffers(device) if dynamic_shapes else BufferPool(device)
        self._inboxes: dict[int, Inbox] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._connect(links, dynamic_shapes)
        taken = [value for step in program.instructions for value in _taken(step)]
        self._slots = dict(zip(taken, count(_FIRST)))
        first = [_Call(_without_message(inbox.begin)) for inbox in self._inboxes.values()]
        last = [_Call(_without_message(outbox.finish)) for outbox in self._outboxes.values()]
        self._calls = [*first, *map(self._resolved, program.instructions), *last]
        self._steps = [*[None] * len(first), *program.instructions, *[None] * len(last)]  # one per call

    def run(self, recorder: Recorder | None = None) -> None:
        """Run the program once. Afterwards slots and links are empty."""
        mark = None if recorder is None else recorder.begin(self._steps)
        slots = [_NOTHING] * (_FIRST + len(self._slots))
        position = 0
        try:
            for position, (work, takes, gives) in enumerate(self._calls):  # noqa: B007  # where it stopped
                message, slots[takes] = slots[takes], _NOTHING
                if mark:
                    mark()
                slots[gives] = work(message)
                if mark:
                    mark()
        except Exception as error:
            self._explain(position, error)
            raise
        if any(slots[_FIRST:]):
            left = [str(value) for value, slot in self._slots.items() if slots[slot]]
            raise RuntimeError(f"a step ended with values left over: {', '.join(left)}")

    def forget_layouts(self) -> None:
        """Agree on shapes anew: each channel's next message carries a header, and old buffers go."""
        self._pool.clear()
        for box in self._boxes():
            box.layouts.clear()

    def close(self) -> None:
        """Give up all that is under way, and the links."""
        for box in self._boxes():
            box.close()

    def _boxes(self) -> Iterator[Inbox | Outbox]:
        yield from self._inboxes.values()
        yield from self._outboxes.values()

    def _connect(self, links: Links, dynamic_shapes: bool) -> None:
        rank, instructions = self._program.rank, self._program.instructions
        incoming = [step for step in instructions if isinstance(step, Recv)]
        for peer in sorted({step.peer for step in incoming}):
            self._inboxes[peer] = Inbox(
                int(peer > rank),  # a link's group has two ranks: 0 is the lower one
                links[peer, rank],
                self._pool,
                [_channel(step.value) for step in incoming if step.peer == peer],
                self._program.in_flight[peer],
                dynamic_shapes,
            )
        for peer in sorted({step.peer for step in instructions if isinstance(step, Send)}):
            self._outboxes[peer] = Outbox(
                int(peer > rank), links[rank, peer], self._pool.device, dynamic_shapes
            )

    def _resolved(self, step: Instruction) -> _Call:
        match step:
            case Action(stage, op, microbatch):
                takes = [self._slots[value] for value in _taken(step)]
                gives = [
                    self._slots[value] for value in produces(step, self._num_stages) if value in self._slots
                ]
                work = partial(self._work[op], self._workers[stage], microbatch)
                return _Call(work, *(takes or [_EMPTY]), *(gives or [_WASTE]))
            case Recv(value, peer):
                return _Call(_without_message(self._inboxes[peer].receive), gives=self._slots[value])
            case Send(value, peer):
                return _Call(partial(self._outboxes[peer].send, _channel(value)), takes=self._slots[value])
            case Release(_, peer):
                return _Call(_without_message(self._outboxes[peer].release))

    def _explain(self, position: int, error: Exception) -> None:
        """Say who waited for what if a message failed; an action's error speaks for itself."""
        step = self._steps[position]
        if isinstance(step, Action) or isinstance(error, torch.OutOfMemoryError):
            return
        rank = self._program.rank
        if isinstance(error, RuntimeError):
            number = position - len(self._inboxes)
            ends = "its first receives" if number < 0 else "its last sends"
            place = f"step {number} of its program ({step})" if step else ends
            raise CommunicationError.at(f"rank {rank}, {place}", error) from error
        if isinstance(error, ValueError) and isinstance(step, Send):
            raise ValueError(f"{step.value} from rank {rank} to rank {step.peer}: {error}") from None


def _taken(step: Instruction) -> tuple[Value, ...]:
    """The messages that an instruction takes; saved and deferred stay inside their StageWorker."""
    match step:
        case Action():
            return tuple(value for value in consumes(step) if value.name in ("x", "g"))
        case Send(value, _):
            return (value,)
        case _:
            return ()


def _channel(value: Value) -> tuple[str, int]:
    """Messages of one kind for one stage have one layout."""
    return value.name, value.stage


def _without_message(work: Callable[[], Any]) -> Callable[[Message], Any]:
    return lambda _: work()

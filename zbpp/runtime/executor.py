"""One rank's program: resolved once into functions over slots, which every step calls in turn.

resolve.py makes of each instruction a function of one message, with the slot that the message comes from and
the slot that the result goes to. `run` below is all that a step does.

A program has two variants, which differ in where receives start (zbpp/schedule/passes/posts.py): one for a
call whose actions may wait for the whole device, one for all other calls. `begin` chooses the variant. Calls
may run other programs: the timetable may change, and empty microbatches are left out. A handler may end a
call by BeginAgain; `drop_messages` then empties the links, and the program can run from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from zbpp.job.errors import CommunicationError, communicating, is_out_of_memory
from zbpp.runtime.buffers import BufferPool
from zbpp.runtime.call.sizes import Size
from zbpp.runtime.extra import Extras
from zbpp.runtime.in_place import MessageChanged, explained
from zbpp.runtime.last_used import LastUsed
from zbpp.runtime.layout import Message
from zbpp.runtime.layouts import Layouts
from zbpp.runtime.links import Inbox, Links, Outbox, make_inboxes, make_outboxes
from zbpp.runtime.resolve import FIRST_SLOT, Resolution, Resolver, StageMethod
from zbpp.runtime.stage import StageWorker
from zbpp.schedule import Action, Op, Post, Program, Recv, Release, Send
from zbpp.schedule.passes.posts import ON_HOST, Posting, Postings, unreceived
from zbpp.schedule.program import Instruction

_NO_MESSAGE: Message = ()
_PARTS = {
    Op.F: "F, the forward",
    Op.B: "B, the backward",
    Op.W: "W, the weights' gradients",
    Op.BW: "the backward",
}


class BeginAgain(Exception):
    """The step has to run again from its beginning: its F's have used weights that have changed since.

    loss_scale: of the second run; None: the first run's. The handler of a program's fence raises it.
    """

    def __init__(self, loss_scale: float | None = None) -> None:
        super().__init__("a step begins again")
        self.loss_scale = loss_scale


class _Bound(NamedTuple):
    """A program as it was given, and what the passes made of it.

    variants: {where receives start: (the program after all passes, the functions that run it, the W's that a
    pass has removed)}.
    """

    given: Program
    variants: dict[Posting, tuple[Program, Resolution, list[Action]]]


class Executor:
    """Runs one rank's programs over its stages and links.

    program: the first one. methods: {op: the method of StageWorker that does it}. postings: the passes that
    place receives on these links. layouts: of messages, see layouts.py. extras: of the pipeline; None: none.
    call: "step", "evaluate" or "predict".

    given: the program before the passes of extras. sizes: of the units of the newest call. inboxes: by
    sender. pool: the receive buffers of inboxes that have no other pool.

    may_wait: whether an action of the next `run` may wait until everything on the device has ended. The first
    matrix product, a compiler and a tuner wait so. True for the first run, for the first run after `rebind`
    for a feature, and for sizes that were not seen before; with dynamic shapes for all runs. Where the
    following step may wait, too, an extra sets it to True in `end`.
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
        layouts: Layouts | None = None,
        postings: Postings = ON_HOST,
        extras: Extras | None = None,
        call: str = "step",
    ) -> None:
        self.layouts = Layouts() if layouts is None else layouts
        self.pool = BufferPool(device)
        self.inboxes = make_inboxes(program, links, self.pool, self.layouts)
        self._outboxes = make_outboxes(program, links, device, self.layouts)
        self._workers = workers
        self._extras, self._call = Extras() if extras is None else extras, call
        self._resolver = Resolver(
            workers, methods, num_stages, self.inboxes, self._outboxes, self._extras, call
        )
        self.postings, self.sizes, self.may_wait = postings, list[Size](), True
        self._bound = LastUsed[str, _Bound]()  # by the program's name
        self.use("", program)
        self.rebind()

    def use(self, name: str, program: Program) -> None:
        """Run this program from now on. name: of the program, among this executor's."""
        self._now, self._name = self._bound.of(name, lambda: _Bound(program, {})), name

    @property
    def given(self) -> Program:
        """The program that runs, before the passes of extras."""
        return self._now.given

    def rebind(self, *, may_wait: bool = True) -> None:
        """Resolve the program again: the extras have changed, and with them `may_wait`, if it is given."""
        self.may_wait |= may_wait
        again = self._now._replace(variants={})
        self._bound.clear()
        self._now = self._bound.of(self._name, lambda: again)
        self._prepare()

    def begin(self, sizes: Sequence[Size]) -> None:
        """Prepare the next `run`, whose microbatches have these sizes. Called before the extras' `begin`."""
        if self.layouts.begin(sizes):
            self.may_wait = True
        if sizes != self.sizes:  # else the same buffers serve again
            self.pool.clear()
        self.sizes = [*sizes]
        self._prepare()

    def _prepare(self) -> None:
        """Choose the variant that the next `run` runs."""
        posting, variants = (
            self.postings.may_wait if self.may_wait else self.postings.later,
            self._now.variants,
        )
        if posting not in variants:
            program = posting(self._extras.rewrite(self._call, self.given))
            kept = set(_weight_actions(program))
            dropped = [each for each in _weight_actions(self.given) if each not in kept]
            variants[posting] = program, self._resolver.resolution(program), dropped
        self._program, self._resolution, self._dropped = variants[posting]

    @property
    def program(self) -> Program:
        """What `run` runs."""
        return self._program

    @property
    def instructions(self) -> list[Instruction]:
        """The instructions of `program` at which a function runs, in order."""
        return [each for each in self._resolution.instructions if each is not None]

    @property
    def device(self) -> torch.device:
        """The device whose memory holds the messages."""
        return self.pool.device

    def run(self) -> None:
        """Run the program once. Afterwards slots and links are empty.

        Raises what a stage raises; where a message fails, CommunicationError with the rank, the instruction
        and its number, the value and the peer; ValueError for a message whose layout has changed; BeginAgain.
        """
        resolution = self._resolution
        slots = [_NO_MESSAGE] * (FIRST_SLOT + len(resolution.slots))
        position = 0
        try:
            for position, (function, takes, gives) in enumerate(resolution.functions):  # noqa: B007  # for explain
                # The slot is emptied, so that a message's memory is free as soon as no stage needs it.
                message, slots[takes] = slots[takes], _NO_MESSAGE
                slots[gives] = function(message)
        except BeginAgain:
            raise
        except Exception as error:
            if isinstance(error, MessageChanged):
                raise explained(error, self._workers) from None
            _explain(error, resolution.instructions, position, self._program.rank)
            raise
        self.may_wait = self.layouts.is_dynamic
        for stage, _, microbatch in self._dropped:  # a pass has left these W's out
            self._workers[stage].take_deferred(microbatch)
        if any(slots[FIRST_SLOT:]):
            left = [str(value) for value, slot in resolution.slots.items() if slots[slot]]
            raise RuntimeError(f"a call ended with values left over: {', '.join(left)}")

    def drop_messages(self) -> None:
        """Empty the links after BeginAgain: receive what other ranks have sent before their fences."""
        rank = self._program.rank
        with communicating(f"rank {rank}, dropping the messages of a step that begins again"):
            for each in unreceived(self._program):
                self.inboxes[each.peer].drop(each.value)
            for outbox in self._outboxes.values():
                outbox.drop()

    def release_received(self, from_stage: int) -> None:
        """Check and free the messages that stages from this one on have received; see Outbox."""
        for outbox in self._outboxes.values():
            outbox.release_received(from_stage)

    def limit_waits(self, limit: timedelta) -> None:
        """From now on a wait for a message lasts so long at most."""
        for box in self.boxes():
            box.limit = limit

    def close(self) -> None:
        """Give up all messages under way, and the links."""
        for box in self.boxes():
            box.close()

    def boxes(self) -> Iterator[Inbox | Outbox]:
        """All ends of links, in the same order for each executor of one program."""
        yield from self.inboxes.values()
        yield from self._outboxes.values()


def _weight_actions(program: Program) -> Iterator[Action]:
    return (each for each in program.instructions if isinstance(each, Action) and each.op == Op.W)


def _explain(error: Exception, instructions: Sequence[Instruction | None], position: int, rank: int) -> None:
    """Note the action on its error; raise another error for a message that failed, or that may not be sent.

    instructions: those of the functions that ran; None for a function that belongs to no instruction.
    position: of the function that failed. rank: in the pipeline. Errors of reductions name themselves.
    """
    instruction = instructions[position]
    if isinstance(instruction, Action):
        error.add_note(_where(instruction, rank))
        return
    if is_out_of_memory(error) or isinstance(error, CommunicationError):
        return
    if not isinstance(instruction, Post | Recv | Send | Release | None):
        error.add_note(f"in {instruction} on rank {rank}")
        return
    if isinstance(error, RuntimeError):
        number = sum(each is not None for each in instructions[:position])
        if instruction is not None:
            place = f"instruction {number} of its program ({instruction})"
        else:
            place = "its last sends"
        raise CommunicationError.at(f"rank {rank}, {place}", error) from None
    if isinstance(error, ValueError) and isinstance(instruction, Send):
        message = f"{instruction.value} from rank {rank} to rank {instruction.peer}"
        raise ValueError(f"{message}: {error}") from None


def _where(action: Action, rank: int) -> str:
    """`in 1B3 (B, the backward, of stage 1, microbatch 3) on rank 1`."""
    part = f"{_PARTS[action.op]}, of stage {action.stage}, microbatch {action.microbatch}"
    process = dist.get_rank() if dist.is_initialized() else rank
    of_job = "" if process == rank else f" of its pipeline, rank {process} of the job"
    return f"in {action} ({part}) on rank {rank}{of_job}"

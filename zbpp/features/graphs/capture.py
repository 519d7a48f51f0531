"""Each action as a graph of its own: captured in the order of the program, replayed in its place.

The capture is one run of an executor whose links carry nothing, and whose actions are captured instead of
computed. So receives start, buffers are taken and messages are released where eager steps do so.

Messages are in the same buffers in every replay. In the capture a buffer is given out as in an eager step,
once nothing refers to its memory any more (see BufferPool), and NotedBuffers notes which one it was. A replay
writes and reads in the order of the capture, so it takes the same buffers in the same order.

An F draws its random numbers by a seed of its own. The seed is set before the replay, outside of the graph:
torch gives the graph the generator's seed and offset when the replay starts. A B goes on with the generator's
state, as in an eager step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import Tensor

from zbpp.devices import seed_generators
from zbpp.runtime.buffers import BufferPool, tensor_in
from zbpp.runtime.executor import Executor
from zbpp.runtime.extra import Extras, Feature, Handler
from zbpp.runtime.layout import Layout, Message, Run, TensorLayout, layout_of
from zbpp.runtime.rank import METHODS, Rank
from zbpp.schedule import Action, Op
from zbpp.schedule.passes.posts import Postings
from zbpp.schedule.program import Instruction, PartOfW, Program


class GraphMaker(Protocol):
    """Captures functions into graphs that share one memory pool, and are replayed in the order of capture."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Around each eager step before the capture."""

    def capturing(self) -> AbstractContextManager[None]:
        """Around the captures of one step."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Record what the function computes, without computing it; returns what replays the record."""


class NotedBuffers(BufferPool):
    """Gives out buffers of a pool that others take from, too, and notes which."""

    def __init__(self, pool: BufferPool) -> None:
        super().__init__(pool.device)
        self._pool = pool
        self._noted: list[tuple[TensorLayout, Tensor]] = []

    def free(self, layout: TensorLayout) -> Tensor:
        """See BufferPool."""
        buffer = self._pool.free(layout)
        self._noted.append((layout, buffer))  # the pool's own tensor: no further use of its memory
        return buffer

    def tensors(self) -> list[Tensor]:
        """What was given out, in this order."""
        return [tensor_in(buffer, layout) for layout, buffer in self._noted]


class PlannedBuffers(BufferPool):
    """Gives out these tensors in turn, pass after pass."""

    def __init__(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        super().__init__(device)
        self._next = cycle(tensors)

    def take(self, layout: TensorLayout) -> Tensor:
        """The next tensor, which has this layout: messages of captured steps never change theirs."""
        return next(self._next)


Captured = Action | PartOfW
CAPTURED = (Action, PartOfW)


def _is_forward(action: Captured) -> bool:
    return isinstance(action, Action) and action.op == Op.F


def noting(actions: Mapping[Captured, Run], layouts: dict[Captured, Layout]) -> dict[Captured, Run]:
    """The actions; each notes the layout of what it gives."""

    def function(action: Captured, message: Message) -> Message:
        made = actions[action](message)
        layouts[action] = layout_of(made)
        return made

    return {action: partial(function, action) for action in actions}


def receive_into(executor: Executor, pools: Mapping[int, BufferPool]) -> None:
    """Let an executor receive messages into these pools, by sender, else into its own."""
    for peer, inbox in executor.inboxes.items():
        inbox.pool = pools.get(peer, executor.pool)


class ActionGraphs:
    """The graphs of one rank's actions.

    Made when the workers have begun a call at fixed addresses, and the executor has run an eager step.
    actions: the eager functions. layouts: of what each action gives.

    replays: what runs in the place of the actions. received: the buffers of messages, by sender.
    """

    def __init__(
        self,
        rank: Rank,
        actions: Mapping[Captured, Run],
        maker: GraphMaker,
        layouts: Mapping[Captured, Layout],
    ) -> None:
        self._workers, self._actions, self._maker, self._layouts = rank.workers, actions, maker, layouts
        self._graphs: dict[Captured, Callable[[], None]] = {}
        # The losses of each F. They stay in the graphs' pool, where nothing else is written while they live.
        self._losses: dict[Captured, tuple[list[Tensor], dict[str, list[Tensor]]]] = {}
        pool = BufferPool(rank.device)
        self._given = NotedBuffers(pool)
        received = {peer: NotedBuffers(pool) for peer in rank.executors["step"].given.in_flight}
        with maker.capturing():
            self._run_silently(rank, received)
        self.replays = self._replays()
        self.received = {peer: PlannedBuffers(rank.device, each.tensors()) for peer, each in received.items()}

    def give_losses(self) -> None:
        """The replayed step has run: give the workers copies of the losses, as if its F's had run."""
        for action, (losses, named) in self._losses.items():
            worker = self._workers[action.stage]
            worker.losses += [each.clone() for each in losses]
            for name, found in named.items():
                worker.named.setdefault(name, []).extend(each.clone() for each in found)

    def _run_silently(self, rank: Rank, received: Mapping[int, BufferPool]) -> None:
        """Run the program with actions that are captured, and with links that carry nothing."""
        executor, num_stages = rank.executors["step"], rank.timetable.num_stages
        links: Any = defaultdict(_SilentLink)
        program = rank.extras.rewrite("step", executor.given)
        captures = Extras([_Captures(self._capture, program)])
        # Later steps start their receives at these places, or behind them: a step that may wait does.
        postings = Postings(executor.postings.later, executor.postings.later)
        silent = Executor(
            program,
            rank.workers,
            METHODS["step"],
            num_stages,
            links,
            rank.device,
            layouts=executor.layouts,
            postings=postings,
            extras=captures,
        )
        receive_into(silent, received)
        silent.run()

    def _capture(self, action: Captured, message: Message) -> Message:
        """Capture one action; returns what it gives."""
        given = tuple([None if each is None else self._given.take(each) for each in self._layouts[action]])
        self._graphs[action] = self._maker.capture(partial(self._run, action, message, given))
        return given

    def _run(self, action: Captured, message: Message, given: Message) -> None:
        """What a graph does: the action, and the copies of what it gives to their buffers."""
        made = self._actions[action](message)
        with torch.no_grad():
            for tensor, place in zip(made, given, strict=True):
                if tensor is not None and place is not None:
                    place.copy_(tensor)
        if _is_forward(action):
            worker = self._workers[action.stage]
            self._losses[action] = worker.losses, worker.named
            worker.losses, worker.named = [], {}

    def _replays(self) -> dict[Captured, Run]:
        tensors = iter(self._given.tensors())
        return {
            action: self._replay(
                action,
                graph,
                tuple([None if each is None else next(tensors) for each in self._layouts[action]]),
            )
            for action, graph in self._graphs.items()
        }

    def _replay(self, action: Captured, graph: Callable[[], None], given: Message) -> Run:
        worker = self._workers[action.stage]

        def replay(_: Message) -> Message:
            graph()
            return given

        def seeded(_: Message) -> Message:
            assert worker.feed.seeds is not None  # a replayed step has those of an eager one
            seed_generators(worker.device, worker.feed.seeds[action.microbatch])
            graph()
            return given

        return seeded if _is_forward(action) else replay


class _Captures(Feature):
    """Captures actions instead of running them."""

    def __init__(self, capture: Callable[[Captured, Message], Message], program: Program) -> None:
        self._capture, self._program = capture, program

    def handlers(self, call: str) -> Mapping[type, Handler]:
        """See Feature. What `around` replaces must be handled."""
        parts = {type(each) for each in self._program.instructions if isinstance(each, PartOfW)}
        return dict.fromkeys(parts, lambda at: None)

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """See Extra."""
        return partial(self._capture, at) if isinstance(at, CAPTURED) else run


class _SilentLink:
    """A process group that sends and receives nothing."""

    def send(self, *_: Any) -> _SilentLink:
        return self

    recv = send

    def wait(self, *_: Any) -> None:
        pass

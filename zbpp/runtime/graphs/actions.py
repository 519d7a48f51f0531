"""Each action as a graph of its own: captured in the order of the program, replayed in its place.

An F draws its random numbers by a seed of its own. The seed is set before the replay, outside of the graph:
torch gives the graph the generator's seed and offset when the replay starts. A B goes on with the generator's
state, as in an eager step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from zbpp.runtime.executor import Executor
from zbpp.runtime.graphs.lifetimes import messages_of
from zbpp.runtime.graphs.losses import StaticLosses
from zbpp.runtime.graphs.maker import GraphMaker, NotCapturable
from zbpp.runtime.graphs.messages import copy_message, planned_buffers, static_messages
from zbpp.runtime.layout import Layout, Message, layout_of
from zbpp.runtime.measure import Recorder
from zbpp.runtime.resolve import StageMethod
from zbpp.runtime.stage import Loss, StageWorker
from zbpp.schedule import Action, Op, Program, Value, consumes, produces

ActionFunction = Callable[[Message], Message]


class RankActions(NamedTuple):
    """The actions of one rank. methods: as in Executor."""

    program: Program
    workers: Mapping[int, StageWorker]
    methods: Mapping[Op, StageMethod]
    num_stages: int

    @property
    def loss(self) -> Loss | None:
        """The loss function, if the last stage is here and has one."""
        last = self.workers.get(self.num_stages - 1)
        return None if last is None else last.loss_fn

    def actions(self) -> list[Action]:
        """All actions in the order of the program."""
        return [each for each in self.program.instructions if isinstance(each, Action)]

    def function(self, action: Action) -> ActionFunction:
        """The action, eager."""
        return partial(self.methods[action.op], self.workers[action.stage], action.microbatch)

    def taken(self, action: Action) -> Value | None:
        """The message that the action takes."""
        return next(iter(messages_of(consumes(action))), None)

    def given(self, action: Action) -> Value | None:
        """The message that the action gives."""
        return next(iter(messages_of(produces(action, self.num_stages))), None)


def watched(rank: RankActions, layouts: dict[Value, Layout]) -> dict[Action, ActionFunction]:
    """The actions, eager; each notes the layouts of its messages."""

    def function(action: Action, message: Message) -> Message:
        made = rank.function(action)(message)
        for value, found in ((rank.taken(action), message), (rank.given(action), made)):
            if value is not None:
                layouts[value] = layout_of(found)
        return made

    return {action: partial(function, action) for action in rank.actions()}


class ActionGraphs:
    """The graphs of one rank's actions.

    Made when the workers have begun a call at fixed addresses; afterwards they hold nothing of it.
    layouts: of the messages. losses: by stage. Raises NotCapturable, with the action.
    """

    def __init__(
        self,
        rank: RankActions,
        maker: GraphMaker,
        layouts: Mapping[Value, Layout],
        losses: Mapping[int, StaticLosses],
        executor: Executor,
    ) -> None:
        self._rank, self._maker, self._losses = rank, maker, losses
        # The g's of the last stage are gradients of losses, which have places of their own: StaticLosses.
        of_loss = "g", rank.num_stages - 1
        passed = {value: each for value, each in layouts.items() if (value.name, value.stage) != of_loss}
        self._messages = static_messages(rank.program, rank.num_stages, passed, executor.device)
        self._buffers = planned_buffers(rank.program, self._messages, executor.device)
        with maker.capturing():
            self._functions = {action: self._captured(action) for action in rank.actions()}

    def use(self, executor: Executor) -> None:
        """Let the executor replay the graphs from now on."""
        executor.replace_actions(self._functions, self._buffers)

    def begin(self) -> None:
        """A replayed step begins."""
        for each in self._buffers.values():
            each.begin()

    def run(self, executor: Executor, recorder: Recorder | None) -> None:
        """Run a step, replaying its actions."""
        executor.run(recorder)

    def _captured(self, action: Action) -> ActionFunction:
        """Capture one action; returns its replay."""
        worker = self._rank.workers[action.stage]
        if action.op == Op.F:
            worker.seed(action.microbatch)
        try:
            with seeded_outside([worker]):
                replay = self._maker.capture(partial(self._run, action))
        except Exception as error:
            raise NotCapturable(f"{action} can't be captured ({reason_of(error)})") from error
        gives = self._place(self._rank.given(action))
        if action.op == Op.F:
            return _seeded(replay, gives, worker, action.microbatch)
        return _plain(replay, gives)

    def _run(self, action: Action) -> None:
        """What a graph does: the action, and the copies of what it gives to fixed places."""
        value = self._rank.given(action)
        made = self._rank.function(action)(self._place(self._rank.taken(action)))
        if action.op == Op.F:
            self._losses[action.stage].take()
        if value is None:
            return
        if value.name == "g" and action.op == Op.F:
            # The gradient of the loss is at a fixed place, see StaticLosses.
            self._messages[value] = made
        elif value in self._messages:
            copy_message(made, self._messages[value])

    def _place(self, value: Value | None) -> Message:
        return () if value is None else self._messages.get(value, ())


@contextmanager
def seeded_outside(workers: Iterable[StageWorker]) -> Iterator[None]:
    """Inside, the F's of these workers don't seed the generators."""
    before = [(worker, worker.seed_generator) for worker in workers]
    try:
        for worker, _ in before:
            worker.seed_generator = _no_seed
        yield
    finally:
        for worker, seed in before:
            worker.seed_generator = seed


def _no_seed(device: torch.device, seed: int) -> None:
    pass


def _plain(replay: Callable[[], None], gives: Message) -> ActionFunction:
    def function(_: Message) -> Message:
        replay()
        return gives

    return function


def _seeded(
    replay: Callable[[], None], gives: Message, worker: StageWorker, microbatch: int
) -> ActionFunction:
    seed = worker.seed

    def function(_: Message) -> Message:
        seed(microbatch)
        replay()
        return gives

    return function


def reason_of(error: BaseException) -> str:
    """The error's first line, with its kind unless it is NotCapturable."""
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, NotCapturable) else f"{type(error).__name__}: {text}"

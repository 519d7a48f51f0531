"""Features and observers: what a pipeline does beside running its program.

The core runs a program over stages and links. It imports no feature and no observer. An extra is one of the
two. A user gives extras to a pipeline, for good or for a while:

    pipeline = Pipeline(stages, timetable, loss_fn, extras=[AFeature()])
    with pipeline.using(AnObserver()) as observer:
        pipeline.step(x, target=y)

A FEATURE changes a call by up to six methods:

    take       Call -> Call: changes what the caller has given, before it is cut into microbatches
    give       Result -> Result: changes what the caller gets
    rewrite    a pass: Program -> Program. It inserts instructions of its own, drops or replaces others
    handlers   {type of an instruction: the function that runs there}
    around     returns a function that wraps the function of an instruction, or replaces it
    around_w   returns a function that wraps the one that runs the tasks of a W; a task adds to one parameter
               or to several

The argument `call` is "step", "evaluate" or "predict".

An OBSERVER has `around`, too. Its function changes nothing, and wraps those of all features:

    at          core    handler    first feature    second feature       observer
    0F0         run                first(run)       second(first(run))   seen(second(first(run)))
    Fetch ...           fetch      fetch            fetch                seen(fetch)
    Reduce 0                                                             no feature handles it: nothing runs

Passes run in the order of the list: a feature sees the instructions that earlier features have inserted.
Functions are wrapped once, when a program is resolved, so without extras a step costs nothing more. The other
methods are called in the order of the list, too, except `give` and `close`: the last extra comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.results import Result
from zbpp.runtime.layout import Message, Run
from zbpp.schedule import Program
from zbpp.schedule.program import Instruction, OnMessage

if TYPE_CHECKING:
    from zbpp.runtime.call.batch import Batch
    from zbpp.runtime.rank import Rank
    from zbpp.runtime.stage import RunW, StageWorker

Handler = Callable[..., Any]
"""The function that runs at an instruction of a feature. Its argument is the instruction.

At an OnMessage it gets the message, too, and returns the one that takes its place.
"""

Background = Callable[[], Callable[[], None]]
"""An observer's function for work in the background, such as a copy or a reduction beside F, B and W.

The feature calls it when the work begins, and calls the function that it returns when the work has ended.
Any thread may make the two calls. On a GPU the work's stream is then the current one.
"""


EMPTY_MICROBATCHES = "empty_microbatches"
"""In `Extra.excludes`: steps with empty microbatches.

Such an extra is made for one timetable: with another one it is closed, and attached again.
"""


class Extra:
    """Base class of Feature and Observer; every method does nothing.

    name: of the extra, in error messages and in `excludes`. excludes: {what can't be in one pipeline with
    this extra: what to write instead}. A key is another extra's name, a dimension of the mesh, which then
    must have one process, "dynamic_shapes" or EMPTY_MICROBATCHES. Pipeline, config and docs read this table
    and no other one.
    State that `attach` makes belongs to one pipeline.
    """

    name: str = ""
    excludes: Mapping[str, str] = MappingProxyType({})

    def attach(self, rank: Rank) -> None:
        """Make groups and buffers, wrap stages, refuse what can't work. Collective over the mesh."""

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """Return the function that runs at an instruction: `run` itself, or one that wraps or replaces it."""
        return run

    def announce(self, batch: Batch) -> None:
        """Called when a call's arguments are cut, before this rank waits for another one in the call."""

    def announce_close(self) -> None:
        """Called when the caller closes the pipeline, before this rank waits for the others to do so."""

    def begin(self, call: Call) -> None:
        """Called before a call's first instruction; again, if a step begins again."""

    def end(self, call: Call, result: Result) -> None:
        """Called after a call's last instruction."""

    def finish_update(self) -> None:
        """Make the weights final: between two calls, somebody is about to read or change them. Collective."""

    def loaded(self) -> None:
        """Called when weights were loaded into the stages. Collective, if the extra is used on all ranks."""

    def fail(self, error: BaseException) -> None:
        """Called instead of `end` when a call has failed: drop its tensors.

        An exception that this method raises takes the place of the call's error.
        """

    def close(self) -> None:
        """Free groups and buffers: the pipeline is closed, has failed, or is used without this extra."""


class Feature(Extra):
    """Base class of extras that change calls; see above."""

    def take(self, call: Call) -> Call:
        """Return the call that runs in the place of the caller's."""
        return call

    def give(self, call: Call, result: Result) -> Result:
        """Return what the caller gets. call: what `take` returned. result: of that call."""
        return result

    def rewrite(self, call: str, program: Program) -> Program:
        """Return the program of a call with the instructions of this feature."""
        return program

    def handlers(self, call: str) -> Mapping[type, Handler]:
        """Return {type of instruction: the function that runs it in this call}."""
        return {}

    def around_w(self, stage: int, run_w: RunW) -> RunW:
        """Return the function that runs the tasks of a stage's W's: `run_w` itself, or one around it.

        Its arguments are a microbatch and the W's tasks. It may call `run_w` for some of them at a time.
        zbpp.autograd.weight_grads.leaves_of says which parameters a task adds to: with shards, gathered ones.
        BW then keeps all that a later W needs, so return `run_w` for a stage that needs nothing else.
        """
        return run_w


class Observer(Extra):
    """Base class of extras that see each instruction, and change nothing."""

    def background(self, at: Instruction) -> Background | None:
        """Return the function for work that an instruction starts in the background; None: none."""
        return None


_REGISTERED = "_zbpp_extra"


def register_extra(extra: Extra, stages: Iterable[nn.Module]) -> None:
    """Register an extra at stages that can't run without it: a Pipeline of such a stage takes the extra."""
    for stage in stages:
        vars(stage)[_REGISTERED] = extra


def extras_of(stages: Iterable[nn.Module]) -> list[Extra]:
    """The extras that are registered at these stages, each once."""
    return [*dict.fromkeys(vars(stage)[_REGISTERED] for stage in stages if _REGISTERED in vars(stage))]


class Extras(list[Extra]):
    """The extras of one pipeline, as one."""

    def check(self, extra: Extra, others: Iterable[str] = ()) -> None:
        """Raises ValueError if one of the others excludes the extra, or the extra one of them.

        others: the names in the pipeline that are no extras, see `Extra.excludes`.
        """
        together = [*self, extra]
        names = {each.name for each in together} | {*others}
        for each in together:
            for other, instead in each.excludes.items():
                if other in names:
                    raise ValueError(f"{each.name} doesn't go with {other}: {instead}")

    @property
    def features(self) -> list[Feature]:
        """The features, in order."""
        return [each for each in self if isinstance(each, Feature)]

    @property
    def observers(self) -> list[Observer]:
        """The observers, in order."""
        return [each for each in self if isinstance(each, Observer)]

    def rewrite(self, call: str, program: Program) -> Program:
        """The program of a call with the instructions of all features."""
        for each in self.features:
            program = each.rewrite(call, program)
        return program

    def binder(self, call: str) -> Callable[[Instruction, Run | None], Run | None]:
        """Return a function from an instruction to the function that runs there; None if nothing runs.

        Its second argument is the core's function; None for an instruction that the core doesn't know.
        """
        handlers, wrapping = self._handlers(call), (*self.features, *self.observers)

        def bind(at: Instruction, run: Run | None) -> Run | None:
            if run is None and type(at) in handlers:
                run = _handled(handlers[type(at)], at)
            return None if run is None else _wrapped(wrapping, call, at, run)

        return bind

    def _handlers(self, call: str) -> dict[type, Handler]:
        """All features' handlers. Raises TypeError if two features handle one type of instruction."""
        handlers: dict[type, Handler] = {}
        for each in self.features:
            own = each.handlers(call)
            for kind in handlers.keys() & own.keys():
                raise TypeError(
                    f"two features handle {kind.__name__}, one of them {each.name}: let the second one "
                    "insert an instruction of its own"
                )
            handlers |= own
        return handlers

    def bind_w(self, workers: Iterable[StageWorker]) -> None:
        """Let W's of these stages run as the features say."""
        for worker in workers:
            run_w: RunW = worker.accumulate
            for each in self.features:
                run_w = each.around_w(worker.index, run_w)
            worker.run_w = run_w

    def background(self, at: Instruction) -> Background | None:
        """The first observer's `background` for an instruction; None if no observer has one."""
        return next((found for each in self.observers if (found := each.background(at)) is not None), None)

    def take(self, call: Call) -> Call:
        """See Feature."""
        for each in self.features:
            call = each.take(call)
        return call

    def give(self, call: Call, result: Result) -> Result:
        """See Feature."""
        for each in reversed(self.features):
            result = each.give(call, result)
        return result

    def announce(self, batch: Batch) -> None:
        """See Extra."""
        for each in self:
            each.announce(batch)

    def announce_close(self) -> None:
        """See Extra."""
        for each in self:
            each.announce_close()

    def begin(self, call: Call) -> None:
        """See Extra."""
        for each in self:
            each.begin(call)

    def end(self, call: Call, result: Result) -> None:
        """See Extra."""
        for each in self:
            each.end(call, result)

    def finish_update(self) -> None:
        """See Extra."""
        for each in [*self]:  # a failure ends the pipeline, and closes the extras
            each.finish_update()

    def loaded(self) -> None:
        """See Extra."""
        for each in self:
            each.loaded()

    def fail(self, error: BaseException) -> None:
        """See Extra. `fail` of every extra is called, even if one of them raises."""
        with ExitStack() as stack:
            for each in self:
                stack.callback(each.fail, error)

    def close(self) -> None:
        """See Extra. The last one is closed first, since it may have wrapped what the others made."""
        while self:
            self.pop().close()


def _wrapped(extras: Iterable[Extra], call: str, at: Instruction, run: Run) -> Run:
    for each in extras:
        wrapped: Run | None = each.around(call, at, run)
        if wrapped is None:
            raise TypeError(
                f"the extra {each.name or type(each).__name__} leaves nothing to run at {at}: let around "
                "return run, or a function around it"
            )
        run = wrapped
    return run


def _handled(handler: Handler, at: Instruction) -> Run:
    handle = partial(handler, at)
    if isinstance(at, OnMessage):
        return handle

    def run(message: Message) -> Message:
        handle()
        return ()

    return run

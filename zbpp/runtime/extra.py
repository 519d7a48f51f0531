"""Extra: what a pipeline does beside running its program.

The core runs programs over stages and links, and knows no extra. Measuring, offload, gradient release, CUDA
graphs are extras: a user gives them to the pipeline, for good or for a while.

    pipeline = Pipeline(stages, timetable, loss_fn, extras=[ActivationOffload(costs)])
    with pipeline.using(Recorder()) as recorder:
        pipeline.step(x, target=y)

A pipeline calls its extras in the order of the list:

    attach     once, when the pipeline takes the extra
    rewrite    each program: the extra may insert instructions of its own
    bind       each instruction of the rewritten program: the extra may wrap the instruction's function
    begin      before each call of step, evaluate and predict
    end        after each such call
    fail       instead of `end`, after an error
    close      once, at the end

Extras are bound when a program is resolved, so an extra that is not there costs nothing. The first extra's
function is the innermost one.

    at          core             first extra        second extra       what runs
    0F0         run              first(run)         second(first(run)) second(first(run))
    Fetch ...   None             fetch              second(fetch)      second(fetch)
    Reduce 0    None             None               None               nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from zbpp.runtime.call import Call, Result
from zbpp.runtime.layout import Message
from zbpp.schedule import Program
from zbpp.schedule.lower import Instruction

if TYPE_CHECKING:
    from zbpp.runtime.rank import Rank

Run = Callable[[Message], Message]
"""An instruction as a function: takes a message, returns a message; () stands for none."""

Background = Callable[[], Callable[[], None]]
"""Called when work in the background begins; returns a function to be called when that work has ended.

Both may be called by any thread; on a GPU, in the stream whose work they mark.
"""


class Extra:
    """Base class of extras; every method does nothing.

    name: what users call the extra. excludes: {name of another extra: what to write instead}; the two can't
    be in one pipeline. State that `attach` or `rewrite` makes belongs to one pipeline.

    looks_inside: whether it needs the Python code inside each action, so that no CUDA graph may run in its
    place. lost: read after `fail`: what the error destroyed, which ends the pipeline; "" if nothing.
    released: {id of a parameter whose gradient the last step has used and dropped: the gradient's sum of
    squares, if that is kept}; None: gradients stay.
    """

    name: str = ""
    lost = ""
    released: Mapping[int, Tensor] | None = None
    looks_inside = False
    excludes: Mapping[str, str] = MappingProxyType({})

    def attach(self, rank: Rank) -> None:
        """Make groups and buffers, wrap stages, refuse what can't work. Collective over the mesh."""

    def rewrite(self, program: Program, call: str) -> Program:
        """Return the program of a call ("step", "evaluate", "predict") with instructions of this extra.

        Called for each program, right before its instructions are bound.
        """
        return program

    def bind(self, at: Instruction, run: Run | None) -> Run | None:
        """Return what runs at an instruction: `run`, or a function around it.

        run is None for an instruction of an extra; the extra that knows it returns the function itself.
        """
        return run

    def background(self, at: Instruction) -> Background | None:
        """Return what wants to know when work runs that the instruction starts in the background."""
        return None

    def begin(self, call: Call) -> None:
        """Called before a call's first instruction."""

    def end(self, call: Call, result: Result) -> None:
        """Called after a call's last instruction."""

    def fail(self, error: BaseException) -> None:
        """Called instead of `end` when a call has failed: drop what it has left.

        What it raises is raised instead of the error.
        """

    def close(self) -> None:
        """Free groups and buffers: the pipeline is closed, has failed, or is used without this extra."""


def instead(function: Callable[[], object]) -> Run:
    """A function without arguments as what runs at an instruction that takes and gives no message."""

    def run(message: Message) -> Message:
        function()
        return ()

    return run


def after(function: Callable[[], object], run: Run) -> Run:
    """`run`, with another function called before it."""

    def both(message: Message) -> Message:
        function()
        return run(message)

    return both


_BROUGHT = "_zbpp_extra"


def bring(extra: Extra, stages: Iterable[nn.Module]) -> None:
    """Let these stages bring an extra along: a Pipeline that gets one of them takes the extra."""
    for stage in stages:
        vars(stage)[_BROUGHT] = extra


def brought_by(stages: Iterable[nn.Module]) -> list[Extra]:
    """The extras that the stages bring along, each once."""
    return [*dict.fromkeys(vars(stage)[_BROUGHT] for stage in stages if _BROUGHT in vars(stage))]


def then(run: Run, function: Callable[[], object]) -> Run:
    """`run`, with another function called behind it."""

    def both(message: Message) -> Message:
        result = run(message)
        function()
        return result

    return both


class Extras(list[Extra]):
    """The extras of one pipeline, as one."""

    def check(self, extra: Extra) -> None:
        """Raises ValueError if one of the others excludes the extra, or the extra one of them."""
        together = [*self, extra]
        names = {each.name for each in together}
        for each in together:
            for other, instead in each.excludes.items():
                if other in names:
                    raise ValueError(f"{each.name} doesn't go with {other}: {instead}")

    def rewrite(self, program: Program, call: str) -> Program:
        """A program with the instructions of all extras."""
        for each in self:
            program = each.rewrite(program, call)
        return program

    def bind(self, at: Instruction, run: Run | None) -> Run | None:
        """What runs at an instruction; None: nothing."""
        for each in self:
            bound = each.bind(at, run)
            if bound is None and run is not None:
                raise TypeError(
                    f"the extra {each.name or type(each).__name__} bound nothing to {at}: let bind return "
                    "run, or a function around it"
                )
            run = bound
        return run

    def background(self, at: Instruction) -> Background | None:
        """The first extra's `background` for an instruction; None if no extra has one."""
        return next((found for each in self if (found := each.background(at)) is not None), None)

    def begin(self, call: Call) -> None:
        """See Extra."""
        for each in self:
            each.begin(call)

    def end(self, call: Call, result: Result) -> None:
        """See Extra."""
        for each in self:
            each.end(call, result)

    def fail(self, error: BaseException) -> None:
        """See Extra. Each extra is told, also if another one raises."""
        with ExitStack() as stack:
            for each in self:
                stack.callback(each.fail, error)

    @property
    def lost(self) -> str:
        """See Extra."""
        return next((each.lost for each in self if each.lost), "")

    @property
    def released(self) -> Mapping[int, Tensor] | None:
        """See Extra."""
        return next((each.released for each in self if each.released is not None), None)

    def close(self) -> None:
        """See Extra. The last one is closed first, since it may have wrapped what the others made."""
        while self:
            self.pop().close()

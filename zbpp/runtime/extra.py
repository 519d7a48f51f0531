"""Extra: what a pipeline does beside running its program.

The core runs programs over stages and links, and knows no extra. Measuring, offload, gradient release, CUDA
graphs are extras: a user gives them to the pipeline, for good or for a while.

    pipeline = Pipeline(stages, timetable, loss_fn, extras=[ActivationOffload()])
    with pipeline.using(TimelineRecorder()) as recorder:
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

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from zbpp.runtime.layout import Message
from zbpp.schedule import Program
from zbpp.schedule.lower import Instruction

if TYPE_CHECKING:
    from zbpp.runtime.call import Call, Result
    from zbpp.runtime.rank_parts import RankParts

Run = Callable[[Message], Message]
"""An instruction as a function: takes a message, returns a message; () stands for none."""

Background = Callable[[], Callable[[], None]]
"""Called when work in the background begins; returns a function to be called when that work has ended.

Both may be called by any thread; on a GPU, in the stream whose work they mark.
"""


class Extra:
    """Base class of extras; every method does nothing.

    name: what users call the extra. excludes: {name of another extra: what to write instead}; the two can't
    be in one pipeline. is_shared: whether processes outside the pipeline wait for this one in a call: then an
    error on this one ends the pipeline. looks_inside: whether it needs the Python code inside each action, so
    that no CUDA graph may run in its place. State that `attach` or `rewrite` makes belongs to one pipeline.
    """

    name: str = ""
    is_shared = False
    looks_inside = False
    excludes: Mapping[str, str] = MappingProxyType({})

    def attach(self, rank: RankParts) -> None:
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
        """Called instead of `end` when a call has failed: drop what it has left."""

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

    def check_named(self, name: str) -> None:
        """Raise ValueError if an extra excludes what has this name."""
        for each in self:
            if name in each.excludes:
                raise ValueError(f"{each.name} doesn't go with {name}: {each.excludes[name]}")

    def rewrite(self, program: Program, call: str) -> Program:
        """A program with the instructions of all extras."""
        for each in self:
            program = each.rewrite(program, call)
        return program

    def bind(self, at: Instruction, run: Run | None) -> Run | None:
        """What runs at an instruction; None: nothing."""
        for each in self:
            run = each.bind(at, run)
        return run

    def background(self, at: Instruction) -> Background | None:
        """What wants to know when work runs that an instruction starts in the background."""
        begins = [found for each in self if (found := each.background(at)) is not None]
        if len(begins) < 2:
            return begins[0] if begins else None

        def begin() -> Callable[[], None]:
            ends = [each() for each in begins]

            def end() -> None:
                for each in ends:
                    each()

            return end

        return begin

    def begin(self, call: Call) -> None:
        """See Extra."""
        for each in self:
            each.begin(call)

    def end(self, call: Call, result: Result) -> None:
        """See Extra."""
        for each in self:
            each.end(call, result)

    def fail(self, error: BaseException) -> None:
        """See Extra."""
        for each in self:
            each.fail(error)

    def close(self) -> None:
        """See Extra. The last one is closed first, since it may have wrapped what the others made."""
        while self:
            self.pop().close()

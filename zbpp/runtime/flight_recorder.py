"""Where a rank stands: its last instructions, with the times at which they began.

The executor notes one time per instruction, which takes about a ten-millionth of a second. Nothing else is
done until somebody asks: `standing` says where the rank is now, `last` what it did before.

When a call fails because a message did not come, the rank that failed is rarely the one to blame: it waited
for a rank that waited for another one. `behind` follows these waits to their end. A rank that waits for all
others (at the end of a call, in a `gather` between calls) waits for one that does not wait itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zbpp.schedule import Action, Recv, Release
from zbpp.schedule.lower import Instruction

_SILENT = 3.0  # s without a word, after which a process is said to be silent; it speaks once a second
_WHY_SILENT = {
    "": "stopped, dead, or in code that holds Python's lock",
    "gone": "its process has ended",
    "stopped": "its process is stopped, as by SIGSTOP",
    "runs": "in code that holds Python's lock",
}


class Standing(NamedTuple):
    """Where a rank is. Times are seconds since the epoch.

    call: "step", "evaluate" or "predict"; "" between calls. number: of the call, from 1; between calls, that
    of the last one. step: the training step that runs; in and between other calls, the last one.
    position, actions: how many instructions, and how many actions, of the call were done.
    instruction: the one that runs, "" for what comes before the first and behind the last. awaits: the rank
    whose message, or whose receive, this instruction waits for. since: when it began, or the last call ended.
    told: when this was known. process: the rank's number in the job; pipeline: which of the job's pipelines
    the rank belongs to. gave_up: whether the rank has waited in vain, for a message or in a collective call.
    """

    rank: int
    call: str
    number: int
    position: int
    actions: int
    num_instructions: int
    instruction: str
    awaits: int | None
    since: float
    told: float
    process: int = 0
    pipeline: str = ""
    gave_up: bool = False
    step: int = 0

    def text(self, now: float, state: str = "") -> str:
        """`at 1B3 for 12.3 s, instruction 14 of 36 of step 7`; and whether the rank is silent.

        state: of its process, a key of _WHY_SILENT.
        """
        silent = now - self.told
        if silent <= _SILENT:
            return self.place(now)
        why = _WHY_SILENT.get(state, _WHY_SILENT[""])
        return f"silent for {silent:.1f} s ({why}), {self.last_seen}"

    @property
    def last_seen(self) -> str:
        """Where a rank was that tells nothing any more. It told its place once a second."""
        return f"last heard of up to a second before, then {self.place(self.told)}"

    @property
    def awaits_all(self) -> bool:
        """Whether the rank waits for no rank in particular, but for all: it has done its part of a call."""
        return self.gave_up or bool(self.call and not self.instruction and self.position)

    @property
    def progress(self) -> tuple[int, bool, int]:
        """How far the rank is; ranks of one job are compared by it."""
        return self.number, not self.call, self.position

    def place(self, now: float) -> str:
        """The same for a rank that tells it `now`."""
        seconds = f"for {now - self.since:.1f} s"
        if not self.call:
            return f"outside of the pipeline's calls {seconds}, {self._after}"
        call = f"step {self.step}" if self.call == "step" else f"{self.call}() {self._after}"
        if not self.instruction:
            return f"at the {'end' if self.position else 'beginning'} of {call} {seconds}"
        return (
            f"at {self.instruction} {seconds}, instruction {self.position + 1} of {self.num_instructions} of "
            f"{call}"
        )

    @property
    def _after(self) -> str:
        return f"after step {self.step}" if self.step else "before the first step"


class FlightRecorder:
    """The instructions of one rank's last two passes over a program, with the times at which they began.

    rank: in its pipeline. process, pipeline: see Standing. num_steps: how many training steps are done.
    """

    def __init__(self, rank: int, process: int = 0, pipeline: str = "") -> None:
        self.rank, self.process, self.pipeline = rank, process, pipeline
        self.number, self.call, self.gave_up, self.num_steps = 0, "", False, 0
        self._since = time.monotonic()
        self._passes: list[tuple[int, str, Sequence[Instruction | None], list[float]]] = []
        self._steps: list[tuple[int, int]] = []  # number of the call, training step: one for each pass

    def enter(self, call: str) -> None:
        """A call begins."""
        self.call, self.number, self._since = call, self.number + 1, time.monotonic()

    def leave(self) -> None:
        """The call has ended."""
        self.call, self._since = "", time.monotonic()

    def begin(self, instructions: Sequence[Instruction | None]) -> Callable[[float], None]:
        """A pass begins; returns a function to be called with the time at which each instruction begins.

        None stands for work that is no instruction. The times are those of time.monotonic.
        """
        times: list[float] = []
        self._steps = [*self._steps[-1:], (self.number, self.num_steps + (self.call == "step"))]
        self._passes = [*self._passes[-1:], (self.number, self.call, instructions, times)]
        return times.append

    def standing(self) -> Standing:
        """Where the rank is now; may be called by another thread."""
        now = time.time()
        at = now - time.monotonic()
        call, number, since = self.call, self.number, self._since
        position, actions, count = 0, 0, 0
        instruction: Instruction | None = None
        for its_number, its_call, instructions, times in self._passes[-1:]:
            if (its_number, its_call) == (number, call) and times:
                done = len(times) - 1
                count = sum(each is not None for each in instructions)
                position = sum(each is not None for each in instructions[:done])
                actions = sum(isinstance(each, Action) for each in instructions[:done])
                instruction, since = instructions[done], times[done]
        text = "" if instruction is None else str(instruction)
        awaits = instruction.peer if isinstance(instruction, Recv | Release) else None
        of_this_pass = self.rank, call, number, position, actions, count, text, awaits
        step = self.num_steps + (call == "step")
        return Standing(*of_this_pass, at + since, now, self.process, self.pipeline, self.gave_up, step)

    def last(self) -> Iterator[tuple[int, str, str, float]]:
        """The recorded instructions: (number of the call, its name, instruction, s since the epoch)."""
        at = time.time() - time.monotonic()
        for number, call, instructions, times in self._passes:
            for instruction, began in zip(instructions, list(times), strict=False):
                if instruction is not None:
                    yield number, call, str(instruction), at + began

    def record(self) -> dict[str, Any]:
        """All of it, for a JSON file. steps: the training step of each call, by the call's number."""
        last = [list(each) for each in self.last()]
        return {"standing": self.standing()._asdict(), "last": last, "steps": dict(self._steps)}


def behind(standings: Mapping[int, Standing], process: int) -> Standing | None:
    """The rank that the others wait for, found from `process` on; None if nothing can be said.

    standings: by process, each with its key as `process`. Follows who awaits whom, up to a rank that is
    silent: what it awaited is long ago.
    """
    newest = max((each.told for each in standings.values()), default=0.0)

    def is_silent(each: Standing) -> bool:
        return newest - each.told > _SILENT

    places = {(each.pipeline, each.rank): each for each in standings.values()}
    here, seen = standings.get(process), set[int]()
    while here is not None and here.process not in seen:
        seen.add(here.process)
        if is_silent(here):
            return here
        if here.awaits is not None:
            here = places.get((here.pipeline, here.awaits))
        elif here.awaits_all:
            others = [each for each in standings.values() if each.process not in seen]
            others = [each for each in others if is_silent(each) or not each.awaits_all]
            here = min(others, key=lambda each: (not is_silent(each), each.progress), default=None)
        else:
            return here
    return None  # ranks that await each other

"""Timetables with the programs of this rank. A step may follow another timetable than the step before it.

A program is made when it is first asked for. What was made is found by the timetable's text.
"""

from __future__ import annotations

from zlib import crc32

from zbpp.runtime.last_used import LastUsed
from zbpp.schedule import Program, Timetable, lower
from zbpp.schedule.lower import Programs

_FORWARDS = {"evaluate": Timetable.forward_only, "predict": Timetable.forward_of_one}


class Lowering:
    """A timetable, and this rank's programs for the calls "step", "evaluate" and "predict".

    index: the rank. text: of the timetable. whole: the timetable that this one lacks some microbatches of;
    None: it lacks none. number: tells timetables apart, the same in all processes.
    """

    def __init__(self, timetable: Timetable, text: str, index: int, whole: Timetable | None = None) -> None:
        self.timetable, self.text, self.number = timetable, text, crc32(text.encode())
        self._whole = whole
        self._index = index
        self._programs: dict[str, Program] = {}
        self._of_step: Programs | None = None
        self._without = LastUsed[int, Lowering]()  # by the number of microbatches

    @property
    def programs(self) -> Programs:
        """The programs of all ranks for a step. Raises PlanError for a timetable that can't run."""
        if self._of_step is None:
            programs = lower(self.timetable)
            self._of_step = programs if self._whole is None else programs.reducing_as(self._whole)
        return self._of_step

    def program(self, call: str) -> Program:
        """This rank's program for a call. Raises PlanError as `lower` does."""
        if call not in self._programs:
            programs = self.programs if call == "step" else lower(_FORWARDS[call](self.timetable))
            self._programs[call] = programs[self._index]
        return self._programs[call]

    def without_last(self, number: int) -> Lowering:
        """The same timetable without its last microbatches; for a call that leaves out as many.

        Which ones the call leaves out does not matter, so that processes that exchange in each F and B, and
        leave out different ones, run the same actions.
        """
        if not number:
            return self

        def made() -> Lowering:
            kept = self.timetable.first(self.timetable.num_microbatches - number)
            return Lowering(kept, f"{self.text}\nwithout the last {number}", self._index, self.timetable)

        return self._without.of(number, made)


class Lowerings:
    """The timetables that a rank has followed, the last ones of them."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._kept = LastUsed[str, Lowering]()

    def of(self, timetable: Timetable | str) -> Lowering:
        """That of a timetable, or of its text. Raises PlanError for a text that is no timetable."""
        text = timetable if isinstance(timetable, str) else str(timetable)

        def made() -> Lowering:
            parsed = Timetable.parse(timetable) if isinstance(timetable, str) else timetable
            return Lowering(parsed, text, self._index)

        return self._kept.of(text, made)

"""Timetables: the actions of each rank in order, and their text form.

A timetable holds no times and no messages. It is stored and sent as a text with one line per rank and one
action per word:

    0F0 0F1 0B0 0W0 0B1 0W1
    1F0 1B0 1W0 1F1 1B1 1W1

Where the sequences of a microbatch are cut into slices, an action is one slice's, as text `0F1.0` (units.py).
"""

from __future__ import annotations

import itertools
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Self, overload

import numpy as np
import numpy.typing as npt

from zbpp.schedule.units import Unit, unit_of

Integers = npt.NDArray[np.int32]

_ACTION = re.compile(r"(\d+)([A-Z]+)(\d+)(?:\.(\d+))?", re.ASCII)
_LARGEST_INDEX = 2**31 - 1

Where = Callable[[int, int], str]
"""How an error names the place of an action: (rank, position in its row) -> such as `line 1, word 3`."""


class PlanError(ValueError):
    """A plan that can't be made, a timetable that can't run, or costs, limits or files that can't be used."""


class Op(IntEnum):
    """What an action does with one stage and one microbatch."""

    F = 0  # forward
    B = 1  # gradient of the stage's input
    W = 2  # gradients of the stage's weights
    BW = 3  # both gradients, in one piece

    def __str__(self) -> str:
        return self.name


class Action(NamedTuple):
    """One op on one stage for one microbatch, as text `2F5`; or for one slice of it, as text `2F5.3`.

    microbatch: the number of the unit, which is a Unit where the timetable has slices.
    """

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.name}{self.microbatch}"

    @classmethod
    def parse(cls, text: str, letters: Mapping[str, Op] = Op.__members__, num_slices: int = 1) -> Self:
        """Read a text such as `2F5`, or `2F5.3` where num_slices is above 3; letters: the names of the ops.

        Raises PlanError for any other text.
        """
        match = _ACTION.fullmatch(text)
        if match is None or match[2] not in letters:
            known = "|".join(letters)
            raise PlanError(
                f"{shown(text)} is no action; an action is stage, {known}, microbatch, such as 2F5"
            )
        stage, letter, microbatch, part = match.groups()
        large = max(map(len, (stage, microbatch, part or ""))) > 10
        unit = 0 if large else int(microbatch) * num_slices + int(part or 0)
        if large or max(int(stage), unit) > _LARGEST_INDEX:
            raise PlanError(f"{shown(text)} names an index above {_LARGEST_INDEX}")
        if (part is None and num_slices > 1) or int(part or 0) >= num_slices:
            named = f"slice {part}" if part else "no slice"
            raise PlanError(f"{shown(text)} names {named}, but the slices are 0..{num_slices - 1}")
        return cls(int(stage), letters[letter], unit_of(unit, num_slices))


class Row(Sequence[Action]):
    """One rank's actions: a sequence of Actions, stored as three integer arrays.

    An action takes 12 bytes, so that a plan of 512 ranks and 4096 microbatches fits into memory. The Action
    objects are made when the row is indexed or iterated. microbatches: the number of each action's unit.
    """

    __slots__ = ("microbatches", "num_slices", "ops", "stages")

    def __init__(self, stages: Integers, ops: Integers, microbatches: Integers, num_slices: int = 1) -> None:
        self.stages, self.ops, self.microbatches = stages, ops, microbatches
        self.num_slices = num_slices

    @classmethod
    def of(cls, actions: Iterable[Action]) -> Row:
        """Make a row of these actions, in this order; it has slices if the first action is one of a Unit."""
        each = list(actions)
        table = np.array([tuple(action) for action in each], dtype=np.int32).reshape(-1, 3)
        stages, ops, microbatches = np.ascontiguousarray(table.T)
        first = each[0].microbatch if each else 0
        return cls(stages, ops, microbatches, first.num_slices if isinstance(first, Unit) else 1)

    def cut(self, num_slices: int) -> Row:
        """The same numbers as those of units of so many slices."""
        return Row(self.stages, self.ops, self.microbatches, num_slices)

    def __len__(self) -> int:
        return len(self.ops)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> Row: ...
    def __getitem__(self, index: int | slice) -> Action | Row:
        if isinstance(index, slice):
            return self.select(index)
        unit = unit_of(int(self.microbatches[index]), self.num_slices)
        return Action(int(self.stages[index]), Op(int(self.ops[index])), unit)

    def select(self, chosen: npt.NDArray[np.bool_ | np.int64] | slice) -> Row:
        """The actions where `chosen` is true, or the actions at the positions `chosen`, in that order."""
        return Row(self.stages[chosen], self.ops[chosen], self.microbatches[chosen], self.num_slices)

    def __iter__(self) -> Iterator[Action]:
        ops = tuple(Op)
        units = self.microbatches.tolist()
        if self.num_slices > 1:
            made = {number: Unit(number, self.num_slices) for number in set(units)}
            units = [made[number] for number in units]
        columns = zip(self.stages.tolist(), self.ops.tolist(), units, strict=True)
        return (Action(stage, ops[op], unit) for stage, op, unit in columns)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        return (
            self.num_slices == other.num_slices
            and np.array_equal(self.stages, other.stages)
            and np.array_equal(self.ops, other.ops)
            and np.array_equal(self.microbatches, other.microbatches)
        )

    def __hash__(self) -> int:
        return hash((self.stages.tobytes(), self.ops.tobytes(), self.microbatches.tobytes()))

    def __str__(self) -> str:
        return " ".join(map(str, self))

    def __repr__(self) -> str:
        return f"Row({str(self)!r})"


class Timetable:
    """For each rank, its actions in order.

    `rank_of[stage]` is the rank that owns a stage. Raises PlanError if a rank has no actions, a stage is
    missing, or a stage is on two ranks. `simulate` checks whether the timetable can run.
    """

    __slots__ = ("num_microbatches", "num_slices", "num_stages", "rank_of", "rows")

    def __init__(
        self, rows: Iterable[Iterable[Action]], where: Where | None = None, *, num_slices: int | None = None
    ) -> None:
        """where: how errors name the place of an action; None: `rank 1, action 2`.

        num_slices: how many slices a microbatch has; None: as many as the rows say.
        """
        made = tuple(row if isinstance(row, Row) else Row.of(row) for row in rows)
        self.rows = made if num_slices is None else tuple([row.cut(num_slices) for row in made])
        self.rank_of = _placement(self.rows, where or _where)
        self.num_stages = len(self.rank_of)
        self.num_slices = _common_num_slices(self.rows)
        if min(int(row.microbatches.min()) for row in self.rows) < 0:
            raise PlanError("microbatches count from 0; a negative one was given")
        self.num_microbatches = 1 + max(int(row.microbatches.max()) for row in self.rows) // self.num_slices

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @property
    def num_units(self) -> int:
        """The number of all microbatches' slices."""
        return self.num_microbatches * self.num_slices

    @classmethod
    def parse(cls, text: str) -> Timetable:
        """Read what `str(timetable)` writes. PlanError tells line and word if one action is wrong."""
        lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        return read_rows(
            [words for _, words in lines],
            where=lambda rank, position: f"line {lines[rank][0]}, word {position + 1}",
        )

    def forward_only(self) -> Timetable:
        """The F's alone, with the same placement and order. Evaluation runs this timetable."""
        return Timetable(row.select(row.ops == Op.F) for row in self.rows)

    def forward_of_one(self) -> Timetable:
        """The F's of microbatch 0 alone, which is not cut into slices."""
        first = [row.select((row.ops == Op.F) & (row.microbatches == 0)) for row in self.rows]
        return Timetable(first, num_slices=1)

    def first(self, num_microbatches: int) -> Timetable:
        """The actions of the first microbatches: what a step runs that leaves the others out."""
        num_units = num_microbatches * self.num_slices
        return Timetable(row.select(row.microbatches < num_units) for row in self.rows)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank owns, ascending."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def __eq__(self, other: object) -> bool:
        return self.rows == other.rows if isinstance(other, Timetable) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.rows)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))

    def __repr__(self) -> str:
        return (
            f"<Timetable of {self.num_ranks} ranks, {self.num_stages} stages, "
            f"{self.num_microbatches} microbatches{_in_slices(self.num_slices)}>"
        )


def read_rows(
    rows: Sequence[Sequence[str]], where: Where, letters: Mapping[str, Op] = Op.__members__
) -> Timetable:
    """Read actions given as texts, one sequence per rank. An error about an action begins with its place.

    A microbatch has as many slices as the largest slice of all texts says.
    """
    with_dots = (words for words in rows if "." in "".join(words))
    num_slices = 1 + max((_slice_in(word) for words in with_dots for word in words), default=0)

    def read(rank: int, position: int, word: str) -> Action:
        try:
            return Action.parse(word, letters, num_slices)
        except PlanError as error:
            raise PlanError(f"{where(rank, position)}: {error}") from None

    return Timetable(
        [
            [read(rank, position, word) for position, word in enumerate(words)]
            for rank, words in enumerate(rows)
        ],
        where=lambda rank, position: f"{where(rank, position)}: {shown(rows[rank][position])}",
        num_slices=num_slices,
    )


def _slice_in(word: str) -> int:
    """The slice that an action's text names; 0 for a text that is no action."""
    match = _ACTION.fullmatch(word)
    return int(match[4]) if match and match[4] and len(match[4]) <= 10 else 0


def _where(rank: int, position: int) -> str:
    return f"rank {rank}, action {position}"


def _common_num_slices(rows: tuple[Row, ...]) -> int:
    found = sorted({row.num_slices for row in rows})
    if len(found) > 1 or not isinstance(found[0], int) or found[0] < 1:
        raise PlanError(f"num_slices={', '.join(map(str, found))}: write one whole number, 1 or more")
    return found[0]


def _in_slices(num_slices: int) -> str:
    return "" if num_slices == 1 else f" in {num_slices} slices"


def _placement(rows: tuple[Row, ...], where: Where) -> tuple[int, ...]:
    """The owner of each stage. Raises PlanError unless every stage has exactly one."""
    if not rows:
        raise PlanError("a timetable needs at least one rank")
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        if not len(row):
            raise PlanError(f"rank {rank} has no actions; every rank owns at least one stage")
        for stage in np.unique(row.stages).tolist():
            if owner.setdefault(stage, rank) != rank:
                raise PlanError(
                    f"{where(rank, _first(row, stage))}: "
                    f"stage {stage} is on rank {owner[stage]} and on rank {rank}; "
                    "a stage can be on one rank only"
                )
    stages = sorted(owner)
    misplaced = next((stage for expected, stage in enumerate(stages) if stage != expected), None)
    if misplaced is not None:
        raise PlanError(
            f"{where(owner[misplaced], _first(rows[owner[misplaced]], misplaced))}: "
            f"stages must be 0..S-1 without a gap; found {_shorten(stages)}"
        )
    return tuple(owner[stage] for stage in stages)


def _first(row: Row, stage: int) -> int:
    """The position of a stage's first action."""
    return int(np.argmax(row.stages == stage))


def shown(value: object, limit: int = 40) -> str:
    """A value as errors show it: short, and a text quoted, with escapes for control characters."""
    if isinstance(value, str):
        return repr(value if len(value) <= limit else f"{value[:limit]}...")
    return reprlib.repr(value)


def printable(text: str) -> str:
    """The text with escapes for control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _shorten(numbers: list[int], limit: int = 12) -> str:
    return ", ".join(map(str, numbers[:limit])) + (", ..." if len(numbers) > limit else "")


StageOp = tuple[int, Op]

# The last entry that has an op decides its number: a BW is numbered among the backwards.
_COUNTED_TOGETHER = ((Op.F,), (Op.W, Op.BW), (Op.B, Op.BW))


def numbered(order: Iterable[StageOp], num_slices: int = 1) -> Row:
    """Give each op its unit: the order (2, F), (2, F), (2, B) is the row 2F0 2F1 2B0.

    With two slices it is the row 2F0.0 2F0.1 2B0.1.
    """
    flat = np.fromiter(itertools.chain.from_iterable(order), dtype=np.int32)
    stages, ops = np.ascontiguousarray(flat.reshape(-1, 2).T)
    microbatches = np.empty_like(ops)
    counted_together = [np.isin(ops, counted_ops) for counted_ops in _COUNTED_TOGETHER]
    for stage in np.unique(stages):
        of_stage = stages == stage
        for each in counted_together:
            counted = np.flatnonzero(of_stage & each)
            microbatches[counted] = np.arange(len(counted))
    return Row(stages, ops, units_in_order(ops, microbatches, num_slices), num_slices)


def units_in_order(ops: int | Integers, numbers: Integers, num_slices: int) -> Integers:
    """The units of actions, given their numbers among the F's, the B's or the W's of their stage.

    F's ascend in units; B's, and W's, ascend in microbatch and descend in slice. ops: of all actions, or one
    for each. The function is its own inverse: the B of unit u is number units_in_order(Op.B, u, num_slices).
    """
    if num_slices == 1:
        return numbers
    descending = numbers + (num_slices - 1 - 2 * (numbers % num_slices))
    return np.where(np.equal(ops, Op.F), numbers, descending)

"""Timetables: the actions of each rank in order, and their text form.

A timetable holds no times and no messages. It is stored and sent as a text with one line per rank and one
action per word:

    0F0 0F1 0B0 0W0 0B1 0W1
    1F0 1B0 1W0 1F1 1B1 1W1
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

Integers = npt.NDArray[np.int32]

_ACTION = re.compile(r"(\d+)([A-Z]+)(\d+)", re.ASCII)
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
    """One op on one stage for one microbatch; as text `2F5`."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.name}{self.microbatch}"

    @classmethod
    def parse(cls, text: str, letters: Mapping[str, Op] = Op.__members__) -> Self:
        """Read a text such as `2F5`; letters: the names of the ops. Raises PlanError for any other text."""
        match = _ACTION.fullmatch(text)
        if match is None or match[2] not in letters:
            known = "|".join(letters)
            raise PlanError(
                f"{shown(text)} is no action; an action is stage, {known}, microbatch, such as 2F5"
            )
        stage, letter, microbatch = match.groups()
        if max(len(stage), len(microbatch)) > 10 or max(int(stage), int(microbatch)) > _LARGEST_INDEX:
            raise PlanError(f"{shown(text)} names an index above {_LARGEST_INDEX}")
        return cls(int(stage), letters[letter], int(microbatch))


class Row(Sequence[Action]):
    """One rank's actions: a sequence of Actions, stored as three integer arrays.

    An action takes 12 bytes, so that a plan of 512 ranks and 4096 microbatches fits into memory. The Action
    objects are made when the row is indexed or iterated.
    """

    __slots__ = ("microbatches", "ops", "stages")

    def __init__(self, stages: Integers, ops: Integers, microbatches: Integers) -> None:
        self.stages, self.ops, self.microbatches = stages, ops, microbatches

    @classmethod
    def of(cls, actions: Iterable[Action]) -> Row:
        """Make a row of these actions, in this order."""
        table = np.array([tuple(action) for action in actions], dtype=np.int32).reshape(-1, 3)
        return cls(*np.ascontiguousarray(table.T))

    def __len__(self) -> int:
        return len(self.ops)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> Row: ...
    def __getitem__(self, index: int | slice) -> Action | Row:
        if isinstance(index, slice):
            return Row(self.stages[index], self.ops[index], self.microbatches[index])
        return Action(int(self.stages[index]), Op(int(self.ops[index])), int(self.microbatches[index]))

    def select(self, chosen: npt.NDArray[np.bool_ | np.int64]) -> Row:
        """The actions where `chosen` is true, or the actions at the positions `chosen`, in that order."""
        return Row(self.stages[chosen], self.ops[chosen], self.microbatches[chosen])

    def __iter__(self) -> Iterator[Action]:
        ops = tuple(Op)
        columns = zip(self.stages.tolist(), self.ops.tolist(), self.microbatches.tolist(), strict=True)
        return (Action(stage, ops[op], microbatch) for stage, op, microbatch in columns)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        return (
            np.array_equal(self.stages, other.stages)
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

    __slots__ = ("num_microbatches", "num_stages", "rank_of", "rows")

    def __init__(self, rows: Iterable[Iterable[Action]], where: Where | None = None) -> None:
        """where: how errors name the place of an action; None: `rank 1, action 2`."""
        self.rows = tuple(row if isinstance(row, Row) else Row.of(row) for row in rows)
        self.rank_of = _placement(self.rows, where or _where)
        self.num_stages = len(self.rank_of)
        if min(int(row.microbatches.min()) for row in self.rows) < 0:
            raise PlanError("microbatches count from 0; a negative one was given")
        self.num_microbatches = 1 + max(int(row.microbatches.max()) for row in self.rows)

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

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
        """The F's of microbatch 0 alone."""
        return Timetable(row.select((row.ops == Op.F) & (row.microbatches == 0)) for row in self.rows)

    def repeated(self, num_steps: int) -> Timetable:
        """The same actions once for each step: microbatch 0 of step 2 has the number 2 * num_microbatches."""
        first = np.arange(num_steps, dtype=np.int32) * self.num_microbatches
        return Timetable(
            Row(
                np.tile(row.stages, num_steps),
                np.tile(row.ops, num_steps),
                (first[:, None] + row.microbatches).ravel(),
            )
            for row in self.rows
        )

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
            f"{self.num_microbatches} microbatches>"
        )


def read_rows(
    rows: Sequence[Sequence[str]], where: Where, letters: Mapping[str, Op] = Op.__members__
) -> Timetable:
    """Read actions given as texts, one sequence per rank. An error about an action begins with its place."""
    return Timetable(
        [
            [_read(word, letters, where, rank, position) for position, word in enumerate(words)]
            for rank, words in enumerate(rows)
        ],
        where=lambda rank, position: f"{where(rank, position)}: {shown(rows[rank][position])}",
    )


def _read(word: str, letters: Mapping[str, Op], where: Where, rank: int, position: int) -> Action:
    try:
        return Action.parse(word, letters)
    except PlanError as error:
        raise PlanError(f"{where(rank, position)}: {error}") from None


def _where(rank: int, position: int) -> str:
    return f"rank {rank}, action {position}"


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


def numbered(order: Iterable[StageOp]) -> Row:
    """Give each op its microbatch: the order (2, F), (2, F), (2, B) is the row 2F0 2F1 2B0."""
    flat = np.fromiter(itertools.chain.from_iterable(order), dtype=np.int32)
    stages, ops = np.ascontiguousarray(flat.reshape(-1, 2).T)
    microbatches = np.empty_like(ops)
    counted_together = [np.isin(ops, counted_ops) for counted_ops in _COUNTED_TOGETHER]
    for stage in np.unique(stages):
        of_stage = stages == stage
        for each in counted_together:
            counted = np.flatnonzero(of_stage & each)
            microbatches[counted] = np.arange(len(counted))
    return Row(stages, ops, microbatches)

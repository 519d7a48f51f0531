"""What each rank does, in order: actions, rows, and their text form.

A timetable holds no times and no messages. Its text is one line per rank, one action
per word, and it is how plans travel:

    0F0 0F1 0B0 0W0 0B1 0W1
    1F0 1B0 1W0 1F1 1B1 1W1
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, Self, overload

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int32]

_ACTION = re.compile(r"(\d+)(BW|F|B|W)(\d+)", re.ASCII)
_LARGEST_INDEX = 2**31 - 1


class PlanError(ValueError):
    """A plan that can't be made, or a timetable that can't run."""


class Op(IntEnum):
    """What an action does with one stage and one microbatch."""

    F = 0  # forward
    B = 1  # gradient of the stage's input
    W = 2  # gradients of its weights
    BW = 3  # both, in one piece

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
    def parse(cls, text: str) -> Self:
        """Read `2F5`. Raises PlanError for anything else."""
        match = _ACTION.fullmatch(text)
        if match is None:
            raise PlanError(f"{text!r} is no action; an action is stage, F|B|W|BW, microbatch, such as 2F5")
        stage, op, microbatch = match.groups()
        if max(len(stage), len(microbatch)) > 10 or max(int(stage), int(microbatch)) > _LARGEST_INDEX:
            raise PlanError(f"{text!r} names an index above {_LARGEST_INDEX}")
        return cls(int(stage), Op[op], int(microbatch))


class Row(Sequence[Action]):
    """One rank's actions: a lazy sequence over three integer arrays.

    12 bytes an action, so that 512 ranks with 4096 microbatches fit; an Action exists
    only while somebody looks at it.
    """

    __slots__ = ("microbatches", "ops", "stages")

    def __init__(self, stages: Integers, ops: Integers, microbatches: Integers) -> None:
        self.stages, self.ops, self.microbatches = stages, ops, microbatches

    @classmethod
    def of(cls, actions: Iterable[Action]) -> Row:
        """A row of these actions, in this order."""
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

    `rank_of[stage]` is the rank that owns a stage. Raises PlanError if a rank has nothing
    to do, a stage is missing, or a stage sits on two ranks; whether the timetable can RUN
    is for `simulate` to say.
    """

    __slots__ = ("num_microbatches", "num_stages", "rank_of", "rows")

    def __init__(self, rows: Iterable[Iterable[Action]]) -> None:
        self.rows = tuple(row if isinstance(row, Row) else Row.of(row) for row in rows)
        self.rank_of = _placement(self.rows)
        self.num_stages = len(self.rank_of)
        if min(int(row.microbatches.min()) for row in self.rows) < 0:
            raise PlanError("microbatches count from 0; a negative one was given")
        self.num_microbatches = 1 + max(int(row.microbatches.max()) for row in self.rows)

    @property
    def num_ranks(self) -> int:
        return len(self.rows)

    @classmethod
    def parse(cls, text: str) -> Timetable:
        """Read what `str(timetable)` writes. Raises PlanError with line and word."""
        lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        return cls([_parse_line(number, words) for number, words in lines])

    def forward_only(self) -> Timetable:
        """The same placement and order with the F's alone: what evaluation runs."""
        return Timetable(
            Row(row.stages[keep], row.ops[keep], row.microbatches[keep])
            for row in self.rows
            for keep in [row.ops == Op.F]
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


def _parse_line(number: int, words: list[str]) -> list[Action]:
    actions = []
    for position, word in enumerate(words, 1):
        try:
            actions.append(Action.parse(word))
        except PlanError as error:
            raise PlanError(f"line {number}, word {position}: {error}") from None
    return actions


def _placement(rows: tuple[Row, ...]) -> tuple[int, ...]:
    if not rows:
        raise PlanError("a timetable needs at least one rank")
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        if not len(row):
            raise PlanError(f"rank {rank} has no actions; every rank owns at least one stage")
        for stage in np.unique(row.stages).tolist():
            if owner.setdefault(stage, rank) != rank:
                raise PlanError(
                    f"stage {stage} is on rank {owner[stage]} and on rank {rank}; it has one owner"
                )
    if min(owner) < 0 or max(owner) != len(owner) - 1:
        raise PlanError(f"stages must be 0..S-1 without a gap; found {_shorten(sorted(owner))}")
    return tuple(owner[stage] for stage in range(len(owner)))


def _shorten(numbers: list[int], limit: int = 12) -> str:
    return ", ".join(map(str, numbers[:limit])) + (", ..." if len(numbers) > limit else "")

"""Fewer bytes: messages between stages travel in bfloat16 or in 8 bits. An approximation.

The pass puts an Encode behind the action that makes a message, and a Decode before the action that takes it:

    rank 0   0F3  Encode x(1,3)  Send x(1,3) to 1  ...  Recv g(0,3) from 1  Decode g(0,3)  0B3
    rank 1   Recv x(1,3) from 0  Decode x(1,3)  1F3  ...  1B3  Encode g(0,3)  Send g(0,3) to 1

A message between two stages of one rank is encoded, too, and the chance of a gradient depends on seed, step,
stage and microbatch. So losses and gradients depend on the cut into stages, and on no rank and no timetable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from zbpp.features.fewer_bytes.codes import CODED, Form, coded, coded_gradient, decoded
from zbpp.runtime.extra import Feature, Handler
from zbpp.runtime.layout import Message
from zbpp.runtime.rank import Rank
from zbpp.schedule import Action, Program, Value, consumes, produces
from zbpp.schedule.interpret.memory import RankBytes
from zbpp.schedule.program import Instruction, OnMessage
from zbpp.seeding import seed_of


class Encode(OnMessage):
    """Put a message into codes."""

    def change_bytes(self, memory: RankBytes) -> None:
        """Count the codes in place of the message."""
        name, stage, microbatch = self.value
        producer = memory.stages[stage - 1 if name == "x" else stage + 1].of(microbatch)
        memory.put_on_way(self.value, producer.sent_x if name == "x" else producer.sent_g)


class Decode(OnMessage):
    """Make a message of its codes."""

    def change_bytes(self, memory: RankBytes) -> None:
        """Count the message in place of its codes."""
        memory.take_from_way(self.value)


def with_codes(program: Program, num_stages: int, boundaries: Collection[int]) -> Program:
    """A program that encodes the messages over these boundaries: boundary k is between stages k and k + 1."""
    found: list[Instruction] = []
    for each in program.instructions:
        if isinstance(each, Action):
            found += [Decode(value) for value in consumes(each) if boundary_of(value) in boundaries]
            found.append(each)
            made = produces(each, num_stages)
            found += [Encode(value) for value in made if boundary_of(value) in boundaries]
        else:
            found.append(each)
    return program._replace(instructions=tuple(found))


def chosen_boundaries(boundaries: Sequence[int] | None, num_stages: int) -> Sequence[int]:
    """The boundaries over which messages are encoded; None: all."""
    return range(num_stages - 1) if boundaries is None else boundaries


def boundary_of(value: Value) -> int | None:
    """The boundary that a value crosses; None for saved and deferred, which stay in their stage."""
    return {"x": value.stage - 1, "g": value.stage}.get(value.name)


@dataclass
class FewerBytes(Feature):
    """Sends x and g between stages with fewer bytes, in `step`: an extra. This is an approximation.

    form: "bfloat16": float32 is cast, half the bytes. "8bit": float32, float64 and bfloat16 become int8, with
        a scale for each row (the last dimension); x is rounded to the nearest, g up or down by chance, so
        that its mean is exact.
    boundaries: [1]: only messages between stages 1 and 2; None: those between all stages.

    Of an x, tensors that require grad are encoded; masks, positions and whole numbers stay. `evaluate` sends
    messages as they are. Raises ValueError for another form, and for a boundary that there is not.
    """

    name = "fewer_bytes"
    excludes = MappingProxyType(
        {"cuda_graphs": "a captured F or B reads its message where it was received; leave one of them out"}
    )

    form: Form
    boundaries: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.form not in CODED:
            raise ValueError(f"form={self.form!r}: write one of {', '.join(map(repr, CODED))}")

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._workers, self._num_stages = rank.workers, rank.timetable.num_stages
        self._chosen = frozenset(chosen_boundaries(self.boundaries, self._num_stages))
        if not self._chosen <= {*range(self._num_stages - 1)}:
            raise ValueError(
                f"boundaries={self.boundaries}: boundary k is between stages k and k + 1, and there are "
                f"{self._num_stages} stages: write numbers from 0 to {self._num_stages - 2}, or None for all"
            )

    def rewrite(self, call: str, program: Program) -> Program:
        """See Feature."""
        return with_codes(program, self._num_stages, self._chosen) if call == "step" else program

    def handlers(self, call: str) -> Mapping[type, Handler]:
        """See Feature."""
        return {Encode: self._encode, Decode: lambda _, message: decoded(message)}

    def _encode(self, at: Encode, message: Message) -> Message:
        value = at.value
        if value.name == "x":
            return coded(message, self.form)
        seeds = self._workers[value.stage + 1].feed.seeds  # of the stage that has made g
        assert seeds is not None  # a step has seeds
        return coded_gradient(message, self.form, seed_of(seeds[value.microbatch], "g"))

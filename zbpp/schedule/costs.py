"""What actions, messages and held tensors cost, per stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zbpp.schedule.timetable import Op, PlanError

PerStage = float | Sequence[float]


class StageCosts(NamedTuple):
    """Costs resolved for a number of stages: each entry a list with one number per stage."""

    duration: dict[Op, list[float]]  # ms
    comm: list[float]  # ms, of a message that leaves the stage
    memory: dict[Op, list[float]]  # change of the level after an action


@dataclass(frozen=True)
class Costs:
    """Durations in ms, memory in bytes or any unit; each a number, or one number per stage.

    f, b, w: durations of F, B, W; bw: of BW, None for b + w.
    comm: time of a message that leaves the stage; it occupies no rank.
    saved: held from F until B or BW; deferred: held from B until W.
    Raises PlanError for a negative or non-finite number.
    """

    f: PerStage = 1.0
    b: PerStage = 1.0
    w: PerStage = 1.0
    bw: PerStage | None = None
    comm: PerStage = 0.0
    saved: PerStage = 1.0
    deferred: PerStage = 0.5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for number in [] if value is None else _numbers(value):
                if not (math.isfinite(number) and number >= 0):
                    raise PlanError(f"Costs({name}={value!r}): {number!r} must be finite and not negative")

    def per_stage(self, num_stages: int) -> StageCosts:
        """Every cost as a list of `num_stages` floats. Raises PlanError for a list of another length."""

        def spread(name: str) -> list[float]:
            numbers = _numbers(getattr(self, name))
            if len(numbers) not in (1, num_stages):
                raise PlanError(f"Costs: {name} has {len(numbers)} numbers for {num_stages} stages")
            return numbers if len(numbers) == num_stages else numbers * num_stages

        b, w, saved, deferred = spread("b"), spread("w"), spread("saved"), spread("deferred")
        whole = [x + y for x, y in zip(b, w, strict=True)] if self.bw is None else spread("bw")
        freed_in_b = [held - kept for held, kept in zip(deferred, saved, strict=True)]
        return StageCosts(
            duration={Op.F: spread("f"), Op.B: b, Op.W: w, Op.BW: whole},
            comm=spread("comm"),
            memory={
                Op.F: saved,
                Op.B: freed_in_b,
                Op.W: [-held for held in deferred],
                Op.BW: [-held for held in saved],
            },
        )


def _numbers(value: object) -> list[float]:
    # A string is a Sequence too: "12" would be 1 and 2.
    numbers: Sequence[Any] = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    try:
        return [float(number) for number in numbers]
    except (TypeError, ValueError):
        raise PlanError(f"a cost is a number or one number per stage, not {value!r}") from None

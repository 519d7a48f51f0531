"""What actions, messages and held tensors cost, per stage.

Costs for one rank's share of a model are another type: `zbpp.planning.RankCosts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, NamedTuple

from zbpp.schedule.timetable import Op, PlanError, shown

PerStage = float | Sequence[float]

_LARGEST = 1e100  # the largest cost allowed: sums of such costs are still finite
ACTIVATIONS, BYTES = "activations", "bytes"


class StageCosts(NamedTuple):
    """`Costs` resolved for a number of stages: lists with one number per stage."""

    duration: dict[Op, list[float]]  # ms
    comm: list[float]  # ms, of a message that leaves the stage
    memory: dict[Op, list[float]]  # what an action adds to the memory that its rank holds; < 0 if it frees
    reduce: list[float]  # ms, of the sum of the stage's gradients over its replicas
    host: list[float]  # ms, of a copy of what F saves to host memory, or back
    exchange: list[float]  # ms, inside F, and inside B or BW
    held: dict[str, list[float]]  # what "saved" and "deferred" of a microbatch hold
    static: list[float]  # held all the time


@dataclass(frozen=True)
class CostNumbers:
    """The eleven costs, each a number or a list of numbers, and the unit of memory: activations or bytes.

    A number is for a stage in `Costs`, and for a rank's share of the model in `zbpp.planning.RankCosts`.
    """

    f: PerStage = 1.0
    b: PerStage = 1.0
    w: PerStage = 1.0
    bw: PerStage | None = None
    comm: PerStage = 0.0
    saved: PerStage = 1.0
    deferred: PerStage = 0.5
    reduce: PerStage = 0.0
    host: PerStage = 0.0
    static: PerStage = 0.0
    exchange: PerStage = 0.0
    memory_unit: str = ACTIVATIONS

    def __post_init__(self) -> None:
        for name, value in self.numbers.items():
            for number in _numbers(name, value):
                if not 0 <= number <= _LARGEST:  # NaN is not
                    given = f"Costs({name}={shown(value)}): {number!r}"
                    raise PlanError(f"{given} must be finite and not negative (at most 1e100)")
        if self.has_exchange:
            self._check_exchange()

    def _check_exchange(self) -> None:
        """Raises PlanError if an F, B or BW takes less time than the exchange inside it."""
        for name in ("f", "b") if self.bw is None else ("f", "b", "bw"):
            whole, inside = _numbers(name, getattr(self, name)), _numbers("exchange", self.exchange)
            longest = max(len(whole), len(inside))  # per_stage refuses lists of other lengths
            for time, part in zip(_repeated(whole, longest), _repeated(inside, longest), strict=False):
                if part > time:
                    raise PlanError(
                        f"Costs(exchange={part:g}) is a part of {name}, which takes {time:g} ms: write "
                        f"{name} with the exchange inside it"
                    )

    @property
    def numbers(self) -> dict[str, PerStage]:
        """The costs by name, without bw where it is b + w."""
        values = {name: getattr(self, name) for name in COST_NAMES}
        return {name: value for name, value in values.items() if value is not None or name != "bw"}

    @property
    def has_host(self) -> bool:
        """Whether copies to host memory have a time. Without one, no activation is offloaded."""
        return any(_numbers("host", self.host))

    @property
    def has_exchange(self) -> bool:
        """Whether F and B contain exchanges of tokens among experts."""
        return any(_numbers("exchange", self.exchange))


COST_NAMES = tuple(field.name for field in fields(CostNumbers) if field.name != "memory_unit")


class Costs(CostNumbers):
    """Costs of a stage: durations in ms, memory in any unit; each a number, or a list with one per stage.

    f, b, w: durations of F, B, W; bw: of BW, None for b + w.
    comm: time of a message that leaves the stage; it occupies no rank.
    saved: held from F until the end of B or BW; deferred: held from B until the end of W.
    reduce: time of summing the stage's gradients over its replicas, once a step; it occupies no rank, but a
        rank reduces one stage at a time. It holds no memory here.
    host: time of copying what F of a microbatch saves to host memory, or back; it occupies no rank, but a
        rank copies one thing at a time. 0: nothing leaves (offload.py).
    static: held all the time: the stage's weights, gradients and optimizer states.
    exchange: time of exchanging tokens among experts, inside F, and again inside B (or BW); f and b contain
        it. Pending W's run meanwhile, see exchange.py.
    memory_unit: the unit that memory is printed in: "activations" or "bytes", as measured costs have it.
    Raises PlanError for a value that is no number, and for a number that is negative or not finite, and
    for an exchange that is longer than the F, B or BW around it.
    """

    def in_bytes(self, saved: PerStage, deferred: PerStage, static: PerStage = 0.0) -> Costs:
        """The same times with memory in bytes."""
        return replace(self, saved=saved, deferred=deferred, static=static, memory_unit=BYTES)

    def per_stage(self, num_stages: int) -> StageCosts:
        """Every cost as a list of `num_stages` floats. Raises PlanError for a list of another length."""

        def spread(name: str) -> list[float]:
            numbers = _numbers(name, getattr(self, name))
            if len(numbers) not in (1, num_stages):
                raise PlanError(f"Costs: {name} has {len(numbers)} numbers for {num_stages} stages")
            return numbers if len(numbers) == num_stages else numbers * num_stages

        b, w, saved, deferred = spread("b"), spread("w"), spread("saved"), spread("deferred")
        whole = [x + y for x, y in zip(b, w, strict=True)] if self.bw is None else spread("bw")
        change_in_b = [after - before for after, before in zip(deferred, saved, strict=True)]
        return StageCosts(
            duration={Op.F: spread("f"), Op.B: b, Op.W: w, Op.BW: whole},
            comm=spread("comm"),
            memory={
                Op.F: saved,
                Op.B: change_in_b,
                Op.W: [-freed for freed in deferred],
                Op.BW: [-freed for freed in saved],
            },
            reduce=spread("reduce"),
            host=spread("host"),
            exchange=spread("exchange"),
            held={"saved": saved, "deferred": deferred},
            static=spread("static"),
        )


def _numbers(name: str, value: object) -> list[float]:
    # A string is a Sequence too: "12" would be 1 and 2.
    each: list[Any] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if any(isinstance(number, bool) or not isinstance(number, Real) for number in each):
        raise PlanError(f"Costs({name}={shown(value)}): a cost is a number or one number per stage")
    try:
        return [float(number) for number in each]
    except OverflowError:
        raise PlanError(f"Costs({name}={shown(value)}): no float is as large as this number") from None


def _repeated(numbers: list[float], length: int) -> list[float]:
    return numbers * length if len(numbers) == 1 else numbers


@dataclass(frozen=True, kw_only=True)
class MicrobatchBytes:
    """The bytes that one microbatch takes on a stage, in the order in which F, B and W need them.

    saved, deferred: held between F and B, and between B and W; messages are not counted.
    x, g: the received input, and the received gradient of the output. x_until, g_until: the op after which
        nothing refers to x, or g, any more.
    sent_x, sent_g: the output, and the gradient of the input, without storages that the stage itself keeps.
    rises: for each Op, the most bytes while it runs, above the level before it.
    """

    saved: float = 0.0
    deferred: float = 0.0
    x: float = 0.0
    g: float = 0.0
    sent_x: float = 0.0
    sent_g: float = 0.0
    x_until: Op = Op.B
    g_until: Op = Op.B
    rises: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # by Op

"""What actions, messages and held tensors cost, per stage, and per microbatch where lengths differ.

A microbatch of length l, its number of tokens in any unit, takes

    times      linear * l + quadratic * l * l      (attention grows with the square)
    messages, copies, exchanges, memory            linear * l

So there is no table of costs by stage and microbatch: a stage has two numbers, and a microbatch has a length.
Costs for one rank's share of a model are another type: `zbpp.planning.RankCosts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, NamedTuple, Self

from zbpp.schedule.timetable import Op, PlanError, shown

PerStage = float | Sequence[float]

_LARGEST = 1e100  # the largest cost allowed: sums of such costs are still finite
_LONGEST = 1e50  # the largest length allowed: its square times a cost is still finite
ACTIVATIONS, BYTES = "activations", "bytes"


class StageCosts(NamedTuple):
    """`Costs` resolved for a number of stages: lists with one number per stage.

    The numbers are those of a microbatch of length 1. Where lengths differ, `quadratic` is the part of
    `duration` that grows with the square, and `duration` does not contain it.
    """

    duration: dict[Op, list[float]]  # ms
    comm: list[float]  # ms, of a message that leaves the stage
    memory: dict[Op, list[float]]  # what an action adds to the memory that its rank holds; < 0 if it frees
    reduce: list[float]  # ms, of the sum of the stage's gradients over its replicas
    host: list[float]  # ms, of a copy of what F saves to host memory, or back
    exchange: list[float]  # ms, inside F, and inside B or BW
    held: dict[str, list[float]]  # what "saved" and "deferred" of a microbatch hold
    static: list[float]  # held all the time
    lengths: tuple[float, ...] = ()  # of each microbatch; (): all are 1
    quadratic: dict[Op, list[float]] | None = None  # ms

    def length(self, microbatch: int) -> float:
        return self.lengths[microbatch] if self.lengths else 1.0


@dataclass(frozen=True)
class CostNumbers:
    """The eleven costs, each a number or a list of numbers, and the unit of memory: activations or bytes.

    A number is for a stage in `Costs`, and for a rank's share of the model in `zbpp.planning.RankCosts`.
    lengths, quadratic: see `of_lengths`. Without lengths every microbatch has the length 1.
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
    lengths: tuple[float, ...] = ()
    quadratic: Self | None = None

    @classmethod
    def of_lengths(cls, lengths: Iterable[float], linear: Self, quadratic: Self | None = None) -> Self:
        """Costs of microbatches of different lengths.

        lengths: of each microbatch, in multiples of the length at which the two parts were measured. A
        microbatch of length 0 is empty and costs nothing.
        linear: the costs that grow with the length, and reduce and static, which belong to the whole step.
        quadratic: the parts of f, b, w and bw that grow with the square of the length; it has no other cost.
        None: that of `linear`, if it has one.
        Raises PlanError for a length that is no number, negative or not finite.
        """
        squared = linear.quadratic if quadratic is None else quadratic
        return replace(linear, lengths=_checked_lengths(lengths), quadratic=squared)

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, tuple) or self.lengths:
            object.__setattr__(self, "lengths", _checked_lengths(self.lengths))
        if self.quadratic is not None:
            self._check_quadratic(self.quadratic)
        for name, value in self.numbers.items():
            for number in _numbers(name, value):
                if not 0 <= number <= _LARGEST:  # NaN is not
                    given = f"Costs({name}={shown(value)}): {number!r}"
                    raise PlanError(f"{given} must be finite and not negative (at most 1e100)")
        if self.has_exchange:
            self._check_exchange()

    def _check_quadratic(self, quadratic: CostNumbers) -> None:
        """Raises PlanError if the quadratic part has a cost that is no time of an action."""
        if not isinstance(quadratic, CostNumbers):
            raise PlanError(
                f"Costs: quadratic={shown(quadratic)}: write quadratic=Costs(f=..., b=..., w=...)"
            )
        usual = type(quadratic)()
        for name in (field.name for field in fields(quadratic)):
            if name not in TIMES and getattr(quadratic, name) != getattr(usual, name):
                raise PlanError(
                    f"quadratic has {name}={shown(getattr(quadratic, name))}: only f, b, w and bw grow with "
                    f"the square of the length; give {name} to the linear part"
                )

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

    def reordered(self, order: Sequence[int]) -> Self:
        """The costs of the same microbatches in another order; order[i]: the microbatch that goes i-th.

        Raises PlanError unless `order` names each microbatch once.
        """
        if self.lengths and sorted(order) != list(range(len(self.lengths))):
            raise PlanError(
                f"order={shown(list(order))} is no order of {len(self.lengths)} microbatches: write each of "
                f"0..{len(self.lengths) - 1} once"
            )
        return replace(self, lengths=tuple(self.lengths[i] for i in order)) if self.lengths else self

    @property
    def uniform(self) -> Self:
        """The same work in microbatches that all cost the same: the mean of each cost over the microbatches.

        Costs without lengths are returned as they are.
        """
        if not self.lengths:
            return self
        number, squares = len(self.lengths), (length**2 for length in self.lengths)
        return self._at(math.fsum(self.lengths) / number, math.fsum(squares) / number)

    def of_length(self, length: float) -> Self:
        """What a microbatch of this length costs, as costs without lengths."""
        return self._at(length, length**2)

    def _at(self, length: float, square: float) -> Self:
        """What a microbatch costs whose length and whose length's square are these numbers."""
        own: dict[str, Any] = {name: _times(getattr(self, name), length) for name in _SCALED}
        parts = [part for part in (self, self.quadratic) if part is not None]
        if any(part.bw is not None for part in parts):
            own["bw"] = _times(self.whole, length)
        if self.quadratic is not None:
            for name in [name for name in TIMES if name in own]:
                part = self.quadratic.whole if name == "bw" else getattr(self.quadratic, name)
                own[name] = _sum(own[name], _times(part, square))
        return replace(self, lengths=(), quadratic=None, **own)

    @property
    def whole(self) -> PerStage:
        """The duration of BW (ms): bw, or b + w."""
        return _sum(self.b, self.w) if self.bw is None else self.bw

    @property
    def has_host(self) -> bool:
        """Whether copies to host memory have a time. Without one, no activation is offloaded."""
        return any(_numbers("host", self.host))

    @property
    def has_exchange(self) -> bool:
        """Whether F and B contain exchanges of tokens among experts."""
        return any(_numbers("exchange", self.exchange))


_NO_COSTS = ("memory_unit", "lengths", "quadratic")
COST_NAMES = tuple(field.name for field in fields(CostNumbers) if field.name not in _NO_COSTS)
TIMES = ("f", "b", "w", "bw")
_SCALED = ("f", "b", "w", "comm", "saved", "deferred", "host", "exchange")  # with the length; and bw


class Costs(CostNumbers):
    """Costs of a stage: durations in ms, memory in any unit; each a number, or a list with one per stage.

    f, b, w: durations of F, B, W; bw: of BW, None for b + w.
    comm: time of a message that leaves the stage; it occupies no rank.
    saved: held from F until the end of B or BW; deferred: held from B until the end of W.
    reduce: time of summing the stage's gradients over its replicas, once a step; it occupies no rank, but a
        rank reduces one stage at a time. It holds no memory here.
    host: time of copying what F of a microbatch saves to host memory, or back; it occupies no rank, but a
        rank copies one thing at a time. 0: nothing leaves (passes/copies.py).
    static: held all the time: the stage's weights, gradients and optimizer states.
    exchange: time of exchanging tokens among experts, inside F, and again inside B (or BW); f and b contain
        it. Pending W's run meanwhile, see interpret/exchange.py.
    memory_unit: the unit that memory is printed in: "activations" or "bytes", as measured costs have it.
    lengths, quadratic: of microbatches that differ, see `of_lengths`.
    Raises PlanError for a value that is no number, and for a number that is negative or not finite, and
    for an exchange that is longer than the F, B or BW around it.
    """

    def in_bytes(self, saved: PerStage, deferred: PerStage, static: PerStage = 0.0) -> Costs:
        """The same times with memory in bytes."""
        return replace(self, saved=saved, deferred=deferred, static=static, memory_unit=BYTES)

    def per_stage(self, num_stages: int, num_microbatches: int | None = None) -> StageCosts:
        """Every cost as a list of `num_stages` floats.

        Raises PlanError for a list of another length, and for another number of lengths than
        num_microbatches (None: any number).
        """
        if self.lengths and num_microbatches not in (None, len(self.lengths)):
            raise PlanError(f"Costs: {len(self.lengths)} lengths for {num_microbatches} microbatches")
        if self.quadratic is not None and not self.lengths:
            return self.of_length(1.0).per_stage(num_stages)

        def numbers(name: str) -> list[float]:
            return _per_stage(name, getattr(self, name), num_stages)

        saved, deferred = numbers("saved"), numbers("deferred")
        change_in_b = [after - before for after, before in zip(deferred, saved, strict=True)]
        return StageCosts(
            duration=_durations(self, num_stages),
            comm=numbers("comm"),
            memory={
                Op.F: saved,
                Op.B: change_in_b,
                Op.W: [-freed for freed in deferred],
                Op.BW: [-freed for freed in saved],
            },
            reduce=numbers("reduce"),
            host=numbers("host"),
            exchange=numbers("exchange"),
            held={"saved": saved, "deferred": deferred},
            static=numbers("static"),
            lengths=self.lengths,
            quadratic=None if self.quadratic is None else _durations(self.quadratic, num_stages),
        )


def _durations(costs: CostNumbers, num_stages: int) -> dict[Op, list[float]]:
    """By op, the time (ms) on each stage."""
    f, b, w = (_per_stage(name, getattr(costs, name), num_stages) for name in ("f", "b", "w"))
    whole = (
        [x + y for x, y in zip(b, w, strict=True)]
        if costs.bw is None
        else _per_stage("bw", costs.bw, num_stages)
    )
    return {Op.F: f, Op.B: b, Op.W: w, Op.BW: whole}


def _per_stage(name: str, value: PerStage, num_stages: int) -> list[float]:
    numbers = _numbers(name, value)
    if len(numbers) not in (1, num_stages):
        raise PlanError(f"Costs: {name} has {len(numbers)} numbers for {num_stages} stages")
    return numbers if len(numbers) == num_stages else numbers * num_stages


def _checked_lengths(lengths: object) -> tuple[float, ...]:
    given: tuple[Any, ...] = tuple(lengths) if isinstance(lengths, Iterable) else ()
    if not given:
        raise PlanError(f"lengths={shown(lengths)}: write one number per microbatch")
    for index, each in enumerate(given):
        is_number = isinstance(each, Real) and not isinstance(each, bool)
        if not (is_number and 0 <= each <= _LONGEST):
            raise PlanError(
                f"length {shown(each)} of microbatch {index}: write a number of 0 or more, at most 1e50"
            )
    return tuple(map(float, given))


def _times(value: PerStage, factor: float) -> PerStage:
    return [factor * each for each in value] if isinstance(value, Sequence) else value * factor


def _sum(one: PerStage, other: PerStage) -> PerStage:
    """The sum per stage; a number is the same for all stages."""
    if not isinstance(one, Sequence) and not isinstance(other, Sequence):
        return one + other
    ones, others = _numbers("f", one), _numbers("f", other)
    if len(ones) != len(others) and 1 not in (len(ones), len(others)):
        raise PlanError(f"Costs: lists of {len(ones)} and of {len(others)} numbers can't be one per stage")
    longest = max(len(ones), len(others))
    return [x + y for x, y in zip(_repeated(ones, longest), _repeated(others, longest), strict=True)]


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

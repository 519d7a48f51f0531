"""What actions, messages and held tensors cost, per stage, and per unit where lengths differ.

A microbatch of length l, its number of tokens in any unit, takes

    times      linear * l + quadratic * square     (attention grows with the square, l * l)
    messages, copies, exchanges, memory            linear * l

The slice [a, b) of sequences takes the same with l = b - a and, in causal attention, with the square
b * b - a * a. So the squares of a microbatch's slices have the sum of the whole microbatch's square.

So there is no table of costs by stage and unit: a stage has two numbers, a unit has a length and a square.
Costs for one rank's share of a model are another type: `zbpp.planning.RankCosts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple, Self

from zbpp.schedule.links import Links, Route
from zbpp.schedule.order import checked_order
from zbpp.schedule.slice_bounds import LONGEST, checked_bounds
from zbpp.schedule.timetable import Op, PlanError, Timetable, shown

PerStage = float | Sequence[float]

_LARGEST = 1e100  # the largest cost allowed: sums of such costs are still finite
ACTIVATIONS, BYTES = "activations", "bytes"


class StageCosts(NamedTuple):
    """`Costs` resolved for a number of stages: lists with one number per stage.

    The numbers are those of a unit of length 1. Where lengths differ, `quadratic` is the part of `duration`
    that grows with the square, and `duration` does not contain it. With slices `memory` and `held` leave out
    the past, which belongs to a whole microbatch.
    """

    duration: dict[Op, list[float]]  # ms
    comm: list[float]  # ms, of a message that leaves the stage
    memory: dict[Op, list[float]]  # what an action adds to the memory that its rank holds; < 0 if it frees
    reduce: list[float]  # ms, of the sum of the stage's gradients over its replicas
    host: list[float]  # ms, of a copy of what F saves to host memory, or back
    exchange: list[float]  # ms, inside F, and inside B or BW
    held: dict[str, list[float]]  # what "saved" and "deferred" hold
    static: list[float]  # held all the time
    past: list[float]  # held from F of a microbatch's first slice until the end of that slice's B
    past_gradients: list[float]  # held from B of a microbatch's last slice until then
    lengths: tuple[float, ...] = ()  # of each unit; (): all are 1
    squares: tuple[float, ...] = ()  # of each unit; (): all are 1
    quadratic: dict[Op, list[float]] | None = None  # ms
    num_slices: int = 1
    routes: Sequence[Route | None] = ()  # by kind, of its message; () without links

    def length(self, unit: int) -> float:
        return self.lengths[unit] if self.lengths else 1.0

    def square(self, unit: int) -> float:
        return self.squares[unit] if self.squares else 1.0


@dataclass(frozen=True)
class CostNumbers:
    """The thirteen costs, each a number or a list of numbers, and the unit of memory: activations or bytes.

    A number is for a stage in `Costs`, and for a rank's share of the model in `zbpp.planning.RankCosts`.
    lengths, quadratic: see `of_lengths`. Without lengths every microbatch has the length 1.
    slice_bounds: see `sliced`; in multiples of the length 1. Without them all slices of a microbatch cost the
    same.
    links: what messages take beside `comm`, by the ranks that they go from and to; see links.py.
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
    slice_bounds: tuple[float, ...] = ()
    past: PerStage = 0.0
    past_gradients: PerStage = 0.0
    links: Links | None = None

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

    def sliced(self, bounds: Sequence[float]) -> Self:
        """The costs of the same microbatches in slices: slice k of each has [bounds[k], bounds[k + 1]).

        bounds: from 0 to the end of the sequence, in tokens or any other unit. Raises PlanError unless they
        ascend from 0.
        """
        checked = checked_bounds(bounds)
        return replace(self, slice_bounds=tuple([each / checked[-1] for each in checked]))

    def unit_slices(self, num_slices: int) -> Self:
        """The same numbers for each slice: a microbatch has the length num_slices."""
        return self if num_slices == 1 else replace(self, slice_bounds=tuple(range(num_slices + 1)))

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, tuple) or self.lengths:
            object.__setattr__(self, "lengths", _checked_lengths(self.lengths))
        if not isinstance(self.slice_bounds, tuple) or self.slice_bounds:
            object.__setattr__(self, "slice_bounds", tuple(map(float, checked_bounds(self.slice_bounds))))
        if self.quadratic is not None:
            self._check_quadratic(self.quadratic)
        if self.links is not None and not isinstance(self.links, Links):
            raise PlanError(
                f"Costs: links={shown(self.links)}: write links=zbpp.Links(latency=..., busy=...)"
            )
        for name, value in self.numbers.items():
            for number in _numbers(name, value):
                if not 0 <= number <= _LARGEST:  # NaN is not
                    given = f"Costs({name}={shown(value)}): {number!r}"
                    raise PlanError(f"{given} must be finite and not negative (at most 1e100)")
        for name in ("f", "b") if self.bw is None else ("f", "b", "bw"):
            self._check_part("exchange", name)
        self._check_part("past", "saved")

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

    def _check_part(self, part: str, whole: str) -> None:
        """Raises PlanError if a cost is less than another one that is a part of it."""
        parts, wholes = (_numbers(name, getattr(self, name)) for name in (part, whole))
        longest = max(len(wholes), len(parts))  # per_stage refuses lists of other lengths
        for most, inside in zip(_repeated(wholes, longest), _repeated(parts, longest), strict=False):
            if inside > most:
                raise PlanError(
                    f"Costs({part}={inside:g}) is a part of {whole}, which is {most:g}: write {whole} with "
                    f"the {part} inside it"
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
        if not self.lengths:
            return self
        checked = checked_order(order, len(self.lengths))
        return replace(self, lengths=tuple([self.lengths[i] for i in checked]))

    @property
    def uniform(self) -> Self:
        """The same work in units that all cost the same: the mean of each cost over the units.

        Costs without lengths and slice_bounds are returned as they are.
        """
        if not self.lengths and not self.slice_bounds:
            return self
        lengths, end = self.lengths or (1.0,), self.slice_bounds[-1] if self.slice_bounds else 1.0
        number, squares = len(lengths), (length**2 for length in lengths)
        return self.at(end * math.fsum(lengths) / number, end**2 * math.fsum(squares) / number)

    def of_length(self, length: float) -> Self:
        """What a microbatch of this length costs, as costs without lengths."""
        return self.at(length, length**2)

    def at(self, length: float, square: float) -> Self:
        """What a unit of this length and this square costs, as costs without lengths and slice_bounds."""
        own: dict[str, Any] = {name: _times(getattr(self, name), length) for name in _SCALED}
        parts = [part for part in (self, self.quadratic) if part is not None]
        if any(part.bw is not None for part in parts):
            own["bw"] = _times(self.whole, length)
        if self.quadratic is not None:
            for name in [name for name in TIMES if name in own]:
                part = self.quadratic.whole if name == "bw" else getattr(self.quadratic, name)
                own[name] = _sum(own[name], _times(part, square))
        if self.links is not None:
            own["links"] = self.links.scaled(length)
        return replace(self, lengths=(), slice_bounds=(), quadratic=None, **own)

    @property
    def without_past(self) -> Self:
        """The costs without what the slices of a microbatch share."""
        return replace(self, saved=_sum(self.saved, _times(self.past, -1.0)), past=0.0, past_gradients=0.0)

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


_NO_COSTS = ("memory_unit", "lengths", "quadratic", "slice_bounds", "links")
COST_NAMES = tuple(field.name for field in fields(CostNumbers) if field.name not in _NO_COSTS)
TIMES = ("f", "b", "w", "bw")
# With the length; and bw.
_SCALED = ("f", "b", "w", "comm", "saved", "deferred", "host", "exchange", "past", "past_gradients")


class Costs(CostNumbers):
    """Costs of a stage: durations in ms, memory in any unit; each a number, or a list with one per stage.

    f, b, w: durations of F, B, W; bw: of BW, None for b + w.
    comm: time of a message that leaves the stage; it occupies no rank.
    saved: held from F until the end of B or BW; deferred: held from B until the end of W.
    reduce: time of summing the stage's gradients over its replicas, once a step; it occupies no rank, but a
        rank reduces one stage at a time. It holds no memory here.
    host: time of copying what F of a microbatch saves to host memory, or back; it occupies no rank, but a
        rank copies one thing at a time. 0: nothing leaves the device.
    static: held all the time: the stage's weights, gradients and optimizer states.
    exchange: time of exchanging tokens among experts, inside F, and again inside B (or BW); f and b contain
        it. Pending W's run meanwhile, see interpret/exchange.py.
    past: the part of `saved` that the slices of a microbatch share, its keys and values; held from F of the
        first slice until the end of B of the first slice.
    past_gradients: the sums of their gradients, held from B of the last slice until then; 0 without slices.
    memory_unit: the unit that memory is printed in: "activations" or "bytes", as measured costs have it.
    links: zbpp.Links, what a message takes of the link that it goes over, beside comm.
    lengths, quadratic: of microbatches that differ, see `of_lengths`. slice_bounds: see `sliced`.
    Raises PlanError for a value that is no number, for a number that is negative or not finite, and for an
    exchange or a past that is more than what contains it.
    """

    def in_bytes(self, saved: PerStage, deferred: PerStage, static: PerStage = 0.0) -> Costs:
        """The same times with memory in bytes."""
        return replace(self, saved=saved, deferred=deferred, static=static, memory_unit=BYTES)

    def of_units(self, timetable: Timetable) -> StageCosts:
        """`per_stage` for the units of a timetable."""
        counts = timetable.num_stages, timetable.num_microbatches, timetable.num_slices
        return self.per_stage(*counts, timetable.rank_of)

    def per_stage(
        self,
        num_stages: int,
        num_microbatches: int | None = None,
        num_slices: int = 1,
        rank_of: Sequence[int] = (),
    ) -> StageCosts:
        """Every cost as a list of `num_stages` floats; num_microbatches None: of whole microbatches.

        rank_of: the rank of each stage, for the links; (): they are left out.

        Raises PlanError for a list of another length, for another number of lengths than num_microbatches or
        of slices than num_slices, and for links of ranks that are not there.
        """
        if self.lengths and num_microbatches not in (None, len(self.lengths)):
            raise PlanError(f"Costs: {len(self.lengths)} lengths for {num_microbatches} microbatches")
        if num_microbatches is not None and self.slice_bounds and len(self.slice_bounds) - 1 != num_slices:
            raise PlanError(f"Costs: {len(self.slice_bounds) - 1} slices, the timetable has {num_slices}")
        lengths, squares = self._unit_sizes(num_microbatches, num_slices)
        if self.quadratic is not None and not lengths:
            return self.of_length(1.0).per_stage(num_stages, rank_of=rank_of)

        def numbers(name: str) -> list[float]:
            return _per_stage(name, getattr(self, name), num_stages)

        saved, deferred = numbers("saved"), numbers("deferred")
        past, past_gradients = (
            numbers(name) if num_slices > 1 else [0.0] * num_stages for name in ("past", "past_gradients")
        )
        saved = [whole - shared for whole, shared in zip(saved, past, strict=True)]
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
            past=past,
            past_gradients=past_gradients,
            lengths=lengths,
            squares=squares,
            quadratic=None if self.quadratic is None else _durations(self.quadratic, num_stages),
            num_slices=num_slices,
            routes=self.links.routes(rank_of) if self.links is not None and rank_of else (),
        )

    def _unit_sizes(
        self, num_microbatches: int | None, num_slices: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(lengths, squares) of all units; two empty tuples where all are 1."""
        if num_microbatches is None or not (self.lengths or self.slice_bounds or num_slices > 1):
            return self.lengths, tuple([length**2 for length in self.lengths])
        sizes = [(1 / num_slices, 1 / num_slices)] * num_slices
        if self.slice_bounds:
            sizes = [(end - start, end**2 - start**2) for start, end in pairwise(self.slice_bounds)]
        microbatches = self.lengths or (1.0,) * num_microbatches
        return (
            tuple([whole * length for whole in microbatches for length, _ in sizes]),
            tuple([whole**2 * square for whole in microbatches for _, square in sizes]),
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
        if not (is_number and 0 <= each <= LONGEST):
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

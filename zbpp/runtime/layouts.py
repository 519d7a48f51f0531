"""What the messages of one rank look like: a layout for each channel and each size of a microbatch.

All messages of one channel (the x of one stage, or its g) and one size have one layout. The first of them has
a header, which says the layout. Both ends of a link keep it. Most layouts grow with the size: where one
microbatch of 5 tokens sends float32[2, 5, 64] and one of 9 sends float32[2, 9, 64], a microbatch of 7 sends
float32[2, 7, 64]. So layouts of further sizes are derived, and their messages have no header:

    sizes known by headers    [2, 5]   [2, 9]   [2, 6]
    a new size                [2, 7] = 1/2 [2, 5] + 1/2 [2, 9]
    its layout, each dim               1/2   d1   + 1/2   d2

Append a 1 to the numbers of a size: this is the size's vector. The layout of a new size is derived if its
vector is a linear combination of the vectors of known sizes, and if the rule has been confirmed before: at
least one known size was such a combination, too, and had the layout that the combination gives. (Through two
sizes there is always a line. Only a third size shows whether layouts grow linearly.) The sender compares each
message with the derived layout before it sends anything; a message that does not fit raises ValueError.

Both ends of a link derive the same layouts, since both have learned from the same messages. Layouts that a
call learns are used for derivations from the next call on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import NamedTuple

from zbpp.runtime.call.sizes import Size
from zbpp.runtime.layout import Layout, TensorLayout
from zbpp.schedule import Unit, Value

_MOST_SIZES = 4096  # then all are forgotten, and layouts are learned anew

Combination = dict[Size, Fraction]
"""{a known size: its factor}."""


class Channel(NamedTuple):
    """The x of one stage, or its g; with slices of sequences, that of the slices with one number."""

    name: str
    stage: int
    slice: int


def channel_of(value: Value) -> Channel:
    """The channel of a message."""
    unit = value.microbatch
    return Channel(value.name, value.stage, unit.slice if isinstance(unit, Unit) else 0)


class Layouts:
    """The layouts of one rank's messages in calls of one kind.

    is_dynamic: whether messages of one size may differ: then nothing is known, and each has a header.
    """

    def __init__(self, *, is_dynamic: bool = False) -> None:
        self.is_dynamic = is_dynamic
        self._sizes: Sequence[Size | None] = ()  # of the call's microbatches
        self.forget()

    def forget(self) -> None:
        """Let layouts change: the next messages have headers again."""
        self._known: dict[tuple[Hashable, Size | None], Layout] = {}
        self._seen: dict[Size, None] = {}  # the sizes of all calls
        self._learned: dict[Size, None] = {}  # in the present call, by headers
        self._span = Span()
        self._combinations: dict[Size, Combination] = {}  # of the call's sizes that have not been learned
        self._fits: dict[Hashable, bool] = {}  # by channel: whether derived layouts were right

    def begin(self, sizes: Sequence[Size]) -> bool:
        """Begin a call whose microbatches have these sizes; returns whether one of them is new."""
        self._take_in()
        if len(self._seen) > _MOST_SIZES:
            self.forget()
        self._sizes, different = sizes, dict.fromkeys(sizes)
        self._combinations = {}
        for size in different:
            if size not in self._span.sizes and (found := self._span.combination(size)) is not None:
                self._combinations[size] = found
        is_new = not self._seen.keys() >= different.keys()
        self._seen |= different
        return is_new

    def of(self, value: Value) -> Layout | None:
        """The layout of a message; None if it isn't known, and a header says it."""
        if self.is_dynamic:
            return None
        channel, size = channel_of(value), self.size_of(value)
        known = self._known.get((channel, size))
        if known is None and size in self._combinations and self._fits.get(channel):
            known = self._derived(channel, self._combinations[size])
        return known

    def learn(self, value: Value, layout: Layout) -> None:
        """Keep the layout that a header says."""
        size = self.size_of(value)
        self._known[channel_of(value), size] = layout
        if size is not None:
            self._learned[size] = None

    def size_of(self, value: Value) -> Size | None:
        """The size of a message's microbatch; None outside of a pipeline's call."""
        return self._sizes[value.microbatch] if self._sizes else None

    def _take_in(self) -> None:
        """Use what the last call has learned."""
        channels = dict.fromkeys(channel for channel, _ in self._known) if self._learned else {}
        for size in self._learned:
            combination = self._span.add(size)
            if combination is None:
                continue
            for channel in channels:
                known = self._known.get((channel, size))
                if known is not None:
                    fits = known == self._derived(channel, combination)
                    self._fits[channel] = fits and self._fits.get(channel, True)
        self._learned.clear()

    def _derived(self, channel: Hashable, combination: Combination) -> Layout | None:
        """The layout that is this combination of known ones; None if there is no such layout."""
        layouts = [self._known.get((channel, size)) for size in combination]
        found = [each for each in layouts if each is not None]
        if len(found) < len(layouts) or len(set(map(len, found))) > 1:
            return None
        factors = [*combination.values()]
        try:
            return tuple([_combined(column, factors) for column in zip(*found, strict=True)])
        except _NotDerived:
            return None


class _NotDerived(Exception):
    """A combination of layouts is no layout."""


def _combined(column: Sequence[TensorLayout | None], factors: Sequence[Fraction]) -> TensorLayout | None:
    """The layout of one tensor, given those in known sizes. Raises _NotDerived."""
    tensors = [each for each in column if each is not None]
    if not tensors:
        return None
    kinds = {(each.dtype, len(each.shape), each.requires_grad) for each in tensors}
    if len(tensors) < len(column) or len(kinds) > 1:
        raise _NotDerived
    shape = [
        sum((factor * dim for factor, dim in zip(factors, dims, strict=True)), Fraction())
        for dims in zip(*(each.shape for each in tensors), strict=True)
    ]
    if any(each.denominator > 1 or each < 0 for each in shape):
        raise _NotDerived
    return tensors[0]._replace(shape=tuple(map(int, shape)))


class _Row(NamedTuple):
    """A vector of an echelon form, as the combination of sizes that it is."""

    kind: str
    pivot: int
    vector: list[Fraction]
    combination: Combination


class Span:
    """The sizes whose vectors are no combinations of those before them; all others are combinations."""

    def __init__(self) -> None:
        self.sizes: set[Size] = set()
        self._rows: list[_Row] = []

    def combination(self, size: Size) -> Combination | None:
        """The size as a combination of sizes that were added; None if it is none."""
        rest, combination = self._reduced(size)
        return None if any(rest) else combination

    def add(self, size: Size) -> Combination | None:
        """Add a size, unless it is a combination of others, which is then returned."""
        rest, combination = self._reduced(size)
        pivot = next((place for place, each in enumerate(rest) if each), None)
        if pivot is None:
            return combination
        own = {each: -factor for each, factor in combination.items()}
        self._rows.append(_Row(size.kind, pivot, rest, {**own, size: Fraction(1)}))
        self.sizes.add(size)
        return None

    def _reduced(self, size: Size) -> tuple[list[Fraction], Combination]:
        """What is left of a size's vector, and the combination that was subtracted."""
        rest, combination = [Fraction(each) for each in (1, *size.numbers)], Combination()
        for kind, pivot, vector, own in self._rows:
            if kind == size.kind and rest[pivot]:
                factor = rest[pivot] / vector[pivot]
                rest = [a - factor * b if b else a for a, b in zip(rest, vector, strict=True)]
                for each, part in own.items():
                    combination[each] = combination.get(each, Fraction()) + factor * part
        return rest, {each: factor for each, factor in combination.items() if factor}

"""Where the slices of sequences begin, and the sequences' end: slice k has [bounds[k], bounds[k + 1])."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from zbpp.schedule.timetable import PlanError, Timetable, shown

LONGEST = 1e50  # the largest length allowed: its square times a cost is still finite
_WRITE = "write where each slice begins, from 0 on, and the sequence's end"


def checked_bounds(given: object, *, name: str = "slice_bounds", in_tokens: bool = False) -> tuple[Any, ...]:
    """The bounds as a tuple. name: of the argument, for errors. in_tokens: whether they are whole numbers.

    Raises PlanError unless they are two numbers or more that ascend from 0.
    """
    kind, unit = (Integral, ", in tokens") if in_tokens else (Real, "")
    bounds: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else ()
    are_numbers = all(isinstance(each, kind) and not isinstance(each, bool) for each in bounds)
    if not are_numbers or len(bounds) < 2 or bounds[0] != 0 or not bounds[-1] <= LONGEST:
        raise PlanError(f"{name}={shown(given)}: {_WRITE}{unit}, as [0, 4096, 8192]")
    for index, (start, end) in enumerate(pairwise(bounds)):
        if not start < end:
            empty = f"slice {index}, [{start}, {end}), has no tokens"
            raise PlanError(f"{name}={shown(given)}: {empty}: let the bounds ascend")
    return bounds


def scaled_bounds(bounds: Sequence[int], length: int) -> tuple[int, ...]:
    """The bounds in a sequence of `length` tokens, as near to the same shares of it as whole tokens are.

    Each slice has a token at least: length is at least the number of slices.
    """
    whole, num_slices = bounds[-1], len(bounds) - 1
    if length == whole:
        return tuple(bounds)
    found = [0]
    for index, bound in enumerate(bounds[1:], 1):
        nearest = (2 * bound * length + whole) // (2 * whole)
        found.append(min(max(nearest, found[-1] + 1), length - num_slices + index))
    return tuple(found)


def bounds_for(timetable: Timetable, given: object, *, name: str = "slice_bounds") -> tuple[int, ...]:
    """The bounds of a timetable's slices, in tokens; () without slices. name: as in `checked_bounds`.

    Raises PlanError unless they are whole numbers that ascend from 0, one more than there are slices. A
    timetable without slices needs none.
    """
    num_slices = timetable.num_slices
    if isinstance(given, Sized) and not len(given):
        if num_slices == 1:
            return ()
        raise PlanError(
            f"the timetable has {num_slices} slices, and {name}= is missing: {_WRITE}, in tokens; "
            "zbpp.planning.balanced_bounds chooses bounds of slices that take equally long"
        )
    bounds = checked_bounds(given, name=name, in_tokens=True)
    if len(bounds) - 1 != num_slices:
        raise PlanError(
            f"{name}={shown(given)} has {len(bounds) - 1} slices, the timetable has {num_slices}: write "
            f"{num_slices + 1} numbers, or plan with num_slices={len(bounds) - 1}"
        )
    return tuple(map(int, bounds)) if num_slices > 1 else ()

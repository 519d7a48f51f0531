"""The order in which the microbatches of a step go: order[i] is the one that goes i-th."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import index

from zbpp.schedule.timetable import PlanError, shown


def checked_order(order: Sequence[int], num_microbatches: int) -> list[int]:
    """The order as ints, which ranks tell each other as text: it may come from NumPy or torch.

    Raises PlanError unless each microbatch is in it once.
    """
    with suppress(TypeError):
        found = [index(each) for each in order]
        if sorted(found) == list(range(num_microbatches)):
            return found
    raise PlanError(
        f"order={shown(order)} is no order of {num_microbatches} microbatches: write each of "
        f"0..{num_microbatches - 1} once"
    )

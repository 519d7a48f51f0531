"""Where the slices of sequences begin: so that all slices take equally long.

In causal attention a later slice reads more keys. Of a sequence of length 1 the first x take linear * x +
quadratic * x * x (zbpp/schedule/costs.py). Equal slices would leave every rank waiting for the last one:
bounds are those that cut this time into equal parts, so later slices have fewer tokens.
"""

from __future__ import annotations

from zbpp.planning.options import check_count
from zbpp.planning.work import Work
from zbpp.schedule.costs import CostNumbers
from zbpp.schedule.timetable import PlanError


def balanced_bounds(num_slices: int, length: int, costs: CostNumbers, multiple: int = 1) -> list[int]:
    """The tokens at which each slice begins, and the length: F, B and W of every slice take equally long.

    length: tokens of a sequence. costs: of a whole sequence of this length (`RankCosts`, or `Costs`), with
    the part that grows with the square of the length as `quadratic`; of lists the mean counts, so slices are
    balanced over the whole model. multiple: all bounds but the last are multiples of it, which kernels may
    like.

    Raises PlanError for numbers that are not whole, and for more slices than there are multiples.
    """
    check_count("num_slices", num_slices)
    check_count("length", length)
    check_count("multiple", multiple)
    last = (length - 1) // multiple  # the last slice begins here at the latest, in multiples
    if last < num_slices - 1:
        unit = "tokens" if multiple == 1 else f"multiples of {multiple} tokens"
        raise PlanError(
            f"num_slices={num_slices} leaves a slice of a sequence of {length} tokens without "
            f"{unit}: write {last + 1} or fewer"
        )
    bounds = [0]
    for k, share in enumerate(balanced_shares(num_slices, costs)[1:-1], 1):
        begin = max(round(share * length / multiple), bounds[-1] // multiple + 1)
        bounds.append(multiple * min(begin, last - (num_slices - 1 - k)))
    return [*bounds, length]


def balanced_shares(num_slices: int, costs: CostNumbers) -> list[float]:
    """The same bounds as shares of a sequence, from 0 to 1."""
    work = Work.of(costs)
    whole = work.time(1.0, 1.0)
    return [0.0, *(work.length(whole * k / num_slices) for k in range(1, num_slices)), 1.0]

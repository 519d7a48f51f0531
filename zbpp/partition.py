"""Which layers go to which stage: contiguous, the heaviest load as light as possible.

The cut depends on the number of stages alone, not on their placement. So all schedules with as many stages
have the same losses, although dropout is seeded by stage. Of the cuts that are equally good, the one that
suits a V best is taken (stages s and S - 1 - s on one rank), then the one that suits a loop best (stages s
and s + S/2). For example, 32 layers and a head as heavy as 3.2 of them, on 16 stages: the head is alone on
the last stage, and stage 0, its neighbour in a V, gets one layer.

Loads are compared heaviest first, then the second heaviest, and so on. Of cuts that are still equal, the one
with more layers on earlier stages is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, permutations

import numpy as np
import numpy.typing as npt

# Decimals to which loads (shares of the model) are rounded: enough to tell loads apart, and few enough to
# hide the rounding errors of sums.
_DIGITS = 9

Key = list[list[float]]


def partition(
    layers: Sequence[float],
    num_stages: int,
    *,
    last: float = 0.0,
) -> list[int]:
    """How many layers each stage gets. Costs in any unit.

    layers: the cost of each layer. last: the cost of what the last stage does besides its layers (head); if
    it is above 0, that stage may have no layer; every other stage has at least one. No cut has a lighter
    heaviest stage. Raises ValueError for too few layers, or a cost that is negative or not finite.
    """
    model = _Model(layers, num_stages, last)
    placements = _two_stage_placements(num_stages)

    def key(counts: list[int]) -> Key:
        stages = model.loads(counts)
        ranks = [_falling(_rank_loads(stages, placement)) for placement in placements]
        early = [-float(count) for count in counts]
        return [[max(stages)], *ranks, _falling(stages), early]

    return _improved(model, model.lightest(), key)


def split_layers(
    num_layers: int,
    num_stages: int,
    layers_per_stage: Sequence[int] | None = None,
    *,
    last_cost: float = 0.0,
) -> list[range]:
    """The layers of each stage, contiguous and in order.

    By default the heaviest stage is as light as can be, see `partition`; layers that can't be divided evenly
    go to EARLIER stages: 7 layers on 3 stages are 3, 2, 2. last_cost: the cost of what the last stage does
    besides its layers, in layers; if it is above 0, the last stage may have no layer.
    Raises ValueError if a stage would be empty, or `layers_per_stage` doesn't fit.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages}: a pipeline has at least one stage; write 1 or more")
    if layers_per_stage is not None:
        counts = checked_counts(layers_per_stage, num_layers, num_stages, least_of_last=0 if last_cost else 1)
    elif num_layers < num_stages:
        raise ValueError(
            f"num_layers={num_layers} is fewer than the {num_stages} stages, and each needs at least one: "
            f"write num_layers={num_stages} or more, or use fewer stages (ranks, or stages per rank)"
        )
    else:
        counts = partition([1.0] * num_layers, num_stages, last=last_cost)
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def checked_counts(
    given_counts: Sequence[int], num_layers: int, num_stages: int, least_of_last: int = 1
) -> list[int]:
    """The counts as a list. Raises ValueError unless they are `num_stages` whole numbers that fit."""
    given = f"layers_per_stage={given_counts}"
    counts = list(given_counts) if isinstance(given_counts, Sequence) else [given_counts]
    if not isinstance(given_counts, Sequence) or not all(type(each) is int for each in counts):
        raise ValueError(f"{given} is no list of whole numbers: write {num_stages} of them, one per stage")
    if len(counts) != num_stages:
        raise ValueError(f"{given} is for {len(counts)} stages: write {num_stages} numbers, one per stage")
    for stage, count in enumerate(counts):
        if count < (least_of_last if stage == num_stages - 1 else 1):
            raise ValueError(f"{given} leaves stage {stage} empty: write 1 or more")
    if sum(counts) != num_layers:
        raise ValueError(f"{given} adds up to {sum(counts)}: make it num_layers={num_layers}, or change that")
    return counts


class _Model:
    """The layers' costs as shares of the whole model, and the stages that they are cut into.

    least: per stage, the fewest layers. until[i]: the cost of the first i layers. extra: per stage, the cost
    of what it does besides its layers.
    """

    def __init__(self, layers: Sequence[float], num_stages: int, last: float) -> None:
        for cost in (*layers, last):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(f"a layer costs {cost!r}: write a finite number, 0 or more")
        if not isinstance(num_stages, int) or num_stages < 1:
            raise ValueError(f"num_stages={num_stages!r}: write a whole number, 1 or more")
        self.num_stages = num_stages
        self.least = [1] * num_stages
        if last > 0 and num_stages > 1:
            self.least[-1] = 0
        if sum(self.least) > len(layers):
            raise ValueError(
                f"{len(layers)} layers are too few for {num_stages} stages: {sum(self.least)} is the least"
            )
        scale = math.fsum((*layers, last)) or 1.0
        self.until = [cost / scale for cost in accumulate(layers, initial=0.0)]
        self.extra = [0.0] * num_stages
        self.extra[-1] += last / scale

    def loads(self, counts: list[int]) -> list[float]:
        """The cost per stage, rounded so that equal loads compare equal."""
        ends = [self.until[bound] for bound in accumulate(counts, initial=0)]
        return [
            round(stop - start + extra, _DIGITS)
            for (start, stop), extra in zip(pairwise(ends), self.extra, strict=True)
        ]

    def lightest(self) -> list[int]:
        """A cut with the lightest heaviest stage that is possible, by dynamic programming over the stages.

        heaviest[j]: the heaviest stage so far in the best cut of the first j layers.
        """
        until = np.array(self.until)
        between = until[None, :] - until[:, None]  # [start, stop]
        size = np.arange(len(until))[None, :] - np.arange(len(until))[:, None]
        heaviest = np.where(np.arange(len(until)) == 0, -math.inf, math.inf)
        starts: list[npt.NDArray[np.intp]] = []
        for extra, least in zip(self.extra, self.least, strict=True):
            either = np.where(size < least, math.inf, np.maximum(heaviest[:, None], between + extra))
            starts.append(either.argmin(axis=0))
            heaviest = either.min(axis=0)
        bounds = [len(until) - 1]
        for start in reversed(starts):
            bounds.append(int(start[bounds[-1]]))
        return [stop - start for start, stop in pairwise(reversed(bounds))]


def _two_stage_placements(num_stages: int) -> list[Sequence[int]]:
    """A V and a loop; none if the number of stages is odd."""
    down = list(range(num_stages // 2))
    return [] if num_stages % 2 else [down + down[::-1], down + down]


def _rank_loads(stages: list[float], rank_of: Sequence[int]) -> list[float]:
    ranks = [0.0] * (max(rank_of) + 1)
    for load, rank in zip(stages, rank_of, strict=True):
        ranks[rank] += load
    return [round(load, _DIGITS) for load in ranks]


def _falling(numbers: list[float]) -> list[float]:
    return sorted(numbers, reverse=True)


def _improved(model: _Model, counts: list[int], key: Callable[[list[int]], Key]) -> list[int]:
    """Local search: one layer less on one stage and one more on another, while that lowers the key."""
    best, improved = key(counts), True
    while improved:
        improved = False
        for giver, taker in permutations(range(model.num_stages), 2):
            if counts[giver] == model.least[giver]:
                continue
            changed = counts.copy()
            changed[giver] -= 1
            changed[taker] += 1
            value = key(changed)
            if value < best:
                counts, best, improved = changed, value, True
    return counts

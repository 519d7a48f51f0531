"""Cuts to compare: all of them if they are not too many, else those that a local search visits.

A cut is the number of layers of each stage, at least 1; several cuts are an array by cut and stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations

import numpy as np

from zbpp.planning.longest_paths import Floats, Numbers

MOST_CUTS = 100_000  # that are all compared
_KEPT = 12  # cuts whose neighbours a round of the local search compares
_MOST_QUIET = 4  # rounds without a better cut, then the search ends
_STEPS = (1, 2, 4)  # layers that a neighbour moves from one stage to another

Worth = Callable[[Numbers], Floats]
"""By cut, the less the better."""


def number_of_cuts(num_layers: int, num_stages: int) -> int:
    return math.comb(num_layers - 1, num_stages - 1)


def all_cuts(num_layers: int, num_stages: int) -> Numbers:
    """Every cut."""
    places = combinations(range(1, num_layers), num_stages - 1)
    number = number_of_cuts(num_layers, num_stages)
    between = np.fromiter(chain.from_iterable(places), dtype=np.int64, count=number * (num_stages - 1))
    return np.diff(between.reshape(number, num_stages - 1), axis=1, prepend=0, append=num_layers)


def cut_by_shares(work: Sequence[float], shares: Sequence[float]) -> list[int]:
    """The cut whose stages have about these shares of the layers' work."""
    done = np.cumsum(work) / math.fsum(work)
    wanted = np.cumsum(shares) / math.fsum(shares)
    num_layers, num_stages = len(work), len(shares)
    ends = np.searchsorted(done, wanted[:-1] - done[0] / 2) + 1
    for stage, end in enumerate(ends):  # each stage has a layer
        least = ends[stage - 1] + 1 if stage else 1
        ends[stage] = min(max(end, least), num_layers - (num_stages - 1 - stage))
    cut: list[int] = np.diff(ends, prepend=0, append=num_layers).tolist()
    return cut


def improved(starts: Numbers, worth: Worth) -> Numbers:
    """The best cuts that a beam search from `starts` finds, best first."""
    kept, values = _best(starts, worth)
    num_quiet = 0
    while num_quiet < _MOST_QUIET:
        before = values[0]
        kept, values = _best(np.concatenate([kept, *_neighbours(kept)]), worth)
        num_quiet = 0 if values[0] < before else num_quiet + 1
    return kept


def _best(cuts: Numbers, worth: Worth) -> tuple[Numbers, Floats]:
    different = np.unique(cuts, axis=0)
    values = worth(different)
    order = np.argsort(values, kind="stable")[:_KEPT]
    return different[order], values[order]


def _neighbours(cuts: Numbers) -> Iterator[Numbers]:
    """The cuts that differ by a few layers, which move from one stage to another."""
    num_stages = cuts.shape[1]
    for taken in range(num_stages):
        for given in range(num_stages):
            for step in _STEPS if taken != given else ():
                moved = cuts[cuts[:, taken] > step]
                moved[:, taken] -= step
                moved[:, given] += step
                yield moved

"""Which sequences share a microbatch, so that microbatches have about as many tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def longest_first(lengths: Sequence[float] | npt.NDArray[np.int64], count: int) -> list[list[int]]:
    """Indices of `count` groups, some of which may be empty: the longest first, to the shortest group."""
    given = np.asarray(lengths)
    groups: list[list[int]] = [[] for _ in range(count)]
    shortest = [(0.0, number) for number in range(count)]
    for index in np.argsort(-given, kind="stable").tolist():
        filled, number = heapq.heappop(shortest)
        groups[number].append(index)
        heapq.heappush(shortest, (filled + float(given[index]), number))
    return groups

"""The times (ms) of messages and of collectives.

A ring moves (n - 1)/n of the bytes over each GPU's link for a reduce-scatter or an all-gather, and twice that
for an all-reduce; a tree of n ranks has log2(n) steps, each with the link's latency.
"""

from __future__ import annotations

import math

from zbpp.cluster.hardware import Link


def message(link: Link, size: float) -> float:
    """One message of `size` bytes."""
    return link.latency_ms + size / link.bytes_per_ms


def gather(link: Link, size: float, ranks: int) -> float:
    """An all-gather to `size` bytes, or a reduce-scatter of `size` bytes."""
    if ranks == 1:
        return 0.0
    return math.ceil(math.log2(ranks)) * link.latency_ms + (ranks - 1) / ranks * size / link.bytes_per_ms


def all_reduce(link: Link, size: float, ranks: int) -> float:
    """A sum of `size` bytes, which every rank gets."""
    return 2 * gather(link, size, ranks)

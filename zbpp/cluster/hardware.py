"""A cluster: equal nodes of equal GPUs, a link inside a node and a link between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from zbpp.ranges import Checked, ranged


def _required(**bounds: Any) -> Any:
    """A field without a default, within bounds."""
    return field(metadata=ranged(None, **bounds).metadata)


@dataclass(kw_only=True)
class Gpu(Checked):
    """One GPU.

    achieved: the share of the peak, and of the memory's bandwidth, that kernels reach. Measure it: `zbpp
    measure` times F, B and W of a model's stages on a GPU.
    """

    peak_tflops: float = _required(above=0, most=1e5, unit="dense TFLOP/s of the datasheet, such as 989")
    achieved: float = _required(above=0, most=1, unit="the share that kernels reach, such as 0.7")
    memory: float = _required(above=0, most=1e4, unit="GiB, such as 80")
    memory_bandwidth: float = _required(above=0, most=1e6, unit="GB/s, such as 3350")

    @property
    def flops(self) -> float:
        """FLOP that kernels do in a ms."""
        return self.peak_tflops * self.achieved * 1e9

    @property
    def traffic(self) -> float:
        """Bytes that kernels read and write in a ms."""
        return self.memory_bandwidth * self.achieved * 1e6

    @property
    def memory_bytes(self) -> float:
        return self.memory * 2**30


@dataclass(kw_only=True)
class Link(Checked):
    """What one GPU can send and, at the same time, receive.

    A ring moves (n - 1)/n of the bytes over each GPU's link for a reduce-scatter or an all-gather, and twice
    that for an all-reduce; a tree of n ranks has log2(n) steps, each with the link's latency. Times in ms.
    """

    bandwidth: float = _required(above=0, most=1e6, unit="GB/s in one direction for each GPU, such as 50")
    latency: float = _required(least=0, most=1e6, unit="microseconds, such as 5")

    def message(self, size: float) -> float:
        """One message of `size` bytes."""
        return self.latency / 1e3 + size / (self.bandwidth * 1e6)

    def gather(self, size: float, ranks: int) -> float:
        """An all-gather to `size` bytes, or a reduce-scatter of `size` bytes."""
        if ranks == 1:
            return 0.0
        steps = math.ceil(math.log2(ranks))
        return steps * self.latency / 1e3 + (ranks - 1) / ranks * size / (self.bandwidth * 1e6)

    def all_reduce(self, size: float, ranks: int) -> float:
        """A sum of `size` bytes, which every rank gets."""
        return 2 * self.gather(size, ranks)


@dataclass(kw_only=True)
class Hardware(Checked):
    """A cluster. Every value but `source`, where the figures come from, must be given."""

    nodes: int = _required(least=1, most=10**6, unit="the number of nodes")
    gpus_per_node: int = _required(least=1, most=1024, unit="the number of GPUs in a node, such as 8")
    gpu: Gpu
    inside: Link
    between: Link
    source: str = ""

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def link(self, crosses: bool) -> Link:
        """The link between nodes, or the link inside a node."""
        return self.between if crosses else self.inside

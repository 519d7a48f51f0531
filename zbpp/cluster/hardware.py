"""A cluster: equal nodes of equal GPUs, a link inside a node and a link between nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from zbpp.ranges import Checked, ranged

_MOST_NODES = 10**6


def _required(**bounds: Any) -> Any:
    """A field without a default, within bounds."""
    return field(metadata=ranged(None, **bounds).metadata)


@dataclass(kw_only=True)
class Gpu(Checked):
    """One GPU.

    achieved: the share of the peak, and of the memory's bandwidth, that kernels reach. Measure it: `zbpp
    measure` times F, B and W of a model's stages on a GPU.
    """

    prefix: ClassVar[str] = "gpu."
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
    """What one GPU can send and, at the same time, receive."""

    bandwidth: float = _required(above=0, most=1e6, unit="GB/s in one direction for each GPU, such as 50")
    latency: float = _required(least=0, most=1e6, unit="microseconds, such as 5")

    @property
    def bytes_per_ms(self) -> float:
        return self.bandwidth * 1e6

    @property
    def latency_ms(self) -> float:
        return self.latency / 1e3


@dataclass(kw_only=True)
class InsideLink(Link):
    """The link between the GPUs of one node."""

    prefix: ClassVar[str] = "inside."


@dataclass(kw_only=True)
class BetweenLink(Link):
    """The link between GPUs of two nodes."""

    prefix: ClassVar[str] = "between."


@dataclass(kw_only=True)
class Hardware(Checked):
    """A cluster. Every value must be given; a missing one is refused by name (zbpp/config/typed_file.py)."""

    nodes: int = _required(least=1, most=_MOST_NODES, unit="the number of nodes")
    gpus_per_node: int = _required(least=1, most=1024, unit="the number of GPUs in a node, such as 8")
    gpu: Gpu
    inside: InsideLink
    between: BetweenLink
    source: str = ""  # where the figures come from

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def link(self, crosses: bool) -> Link:
        """The link between nodes, or the link inside a node."""
        return self.between if crosses else self.inside

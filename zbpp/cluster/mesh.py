"""The degrees of pipeline, replicas, shards and tensor parallelism, and which groups cross nodes.

zbpp's mesh has the dimensions pipeline, replicate, shard, tensor, outermost first: the ranks of a
tensor-parallel group are neighbours inside a node, and the pipeline crosses nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from zbpp.cluster.hardware import Hardware
from zbpp.ranges import ConfigError

NAMES = ("pipeline", "replicate", "shard", "tensor")


class Mesh(NamedTuple):
    """The sizes of the mesh's dimensions."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def num_gpus(self) -> int:
        return self.pipeline * self.block

    @property
    def block(self) -> int:
        """How many GPUs share one rank of the pipeline."""
        return self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """How many ranks read different data."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return " x ".join(map(str, self))

    def crosses(self, name: str, gpus_per_node: int) -> bool:
        """Whether a group of the dimension (not the pipeline) has ranks on several nodes."""
        extent = {"tensor": self.tensor, "shard": self.tensor * self.shard, "replicate": self.block}[name]
        size = getattr(self, name)
        if size == 1:
            return False
        return extent > gpus_per_node or bool(gpus_per_node % extent)

    def message_crosses(self, rank: int, gpus_per_node: int) -> bool:
        """Whether messages from a pipeline rank to the next one leave the node, on any of its GPUs."""
        first, block = rank * self.block, self.block
        return block >= gpus_per_node or any(
            (first + gpu) // gpus_per_node != (first + block + gpu) // gpus_per_node for gpu in range(block)
        )


def check(mesh: Mesh, hardware: Hardware) -> None:
    """Raises ConfigError for a mesh that is not the whole cluster."""
    if mesh.num_gpus != hardware.num_gpus:
        raise ConfigError(
            f"pipeline x replicate x shard x tensor = {mesh} is {mesh.num_gpus} GPUs, and the cluster has "
            f"{hardware.num_gpus}: write degrees whose product is {hardware.num_gpus}"
        )


def meshes(hardware: Hardware, fixed: dict[str, int], *, across: bool = False) -> Iterator[Mesh]:
    """The meshes of the whole cluster. fixed: sizes that are given.

    Tensor parallelism stays inside a node, unless `across` or its degree is given. The ranks that read
    different data are all replicas, all shards, or shards inside a node with replicas over nodes. Raises
    ConfigError if the given sizes do not divide the cluster.
    """
    total, node = hardware.num_gpus, hardware.gpus_per_node
    given = 1
    for name, size in fixed.items():
        given *= size
        if size < 1 or total % given:
            text = ", ".join(f"{name}={size}" for name, size in fixed.items())
            raise ConfigError(
                f"--degrees {text}: the product does not divide the {total} GPUs of the cluster "
                f"({hardware.nodes} nodes of {node}): write divisors of {total}"
            )
    for tensor in _sizes("tensor", fixed, total):
        if tensor > node and not across and "tensor" not in fixed:
            continue
        for pipeline in _sizes("pipeline", fixed, total // tensor):
            data = total // tensor // pipeline
            for shard in _shards(data, tensor, node, fixed):
                mesh = Mesh(pipeline, data // shard, shard, tensor)
                if fixed.get("replicate", mesh.replicate) == mesh.replicate:
                    yield mesh


def _sizes(name: str, fixed: dict[str, int], total: int) -> list[int]:
    if name in fixed:
        return [fixed[name]] if total % fixed[name] == 0 else []
    low = [size for size in range(1, math.isqrt(total) + 1) if total % size == 0]
    return sorted({*low, *(total // size for size in low)})


def _shards(data: int, tensor: int, node: int, fixed: dict[str, int]) -> list[int]:
    if "shard" in fixed:
        return [fixed["shard"]] if data % fixed["shard"] == 0 else []
    if "replicate" in fixed:
        return [data // fixed["replicate"]] if data % fixed["replicate"] == 0 else []
    inside = node // tensor if tensor <= node else 1
    return sorted({1, data, *([inside] if inside and data % inside == 0 else [])})

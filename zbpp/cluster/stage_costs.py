"""A run on a mesh of a cluster, as the Costs of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from zbpp.cluster import layer_work
from zbpp.cluster.hardware import Gpu, Hardware, Link
from zbpp.cluster.layer_work import COMPUTE, STORED, Part, Work
from zbpp.cluster.model_sizes import ModelSizes
from zbpp.partition import partition
from zbpp.schedule import Costs, Links

_STEP_TRAFFIC = 7  # the optimizer reads gradient, weight and two states, and writes all but the gradient


class Mesh(NamedTuple):
    """The sizes of the mesh's dimensions, outermost first.

    The ranks of a tensor-parallel group are neighbours inside a node, and the pipeline crosses nodes.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def block(self) -> int:
        """How many GPUs share one rank of the pipeline."""
        return self.replicate * self.shard * self.tensor

    @property
    def num_gpus(self) -> int:
        return self.pipeline * self.block

    @property
    def data(self) -> int:
        """How many ranks read different data."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return " x ".join(map(str, self))

    def crosses(self, name: str, gpus_per_node: int) -> bool:
        """Whether a group of the dimension (not the pipeline) has ranks on several nodes."""
        extent = {"tensor": self.tensor, "shard": self.tensor * self.shard, "replicate": self.block}[name]
        if getattr(self, name) == 1:
            return False
        return extent > gpus_per_node or bool(gpus_per_node % extent)


@dataclass(frozen=True)
class Run:
    """A run without its schedule. sequences: in a microbatch.

    recompute: B computes all activations of its layers again. head_at_once: as memory.head_at_once.
    """

    sizes: ModelSizes
    hardware: Hardware
    mesh: Mesh
    sequences: int = 1
    recompute: bool = False
    head_at_once: bool = False

    @property
    def tokens(self) -> int:
        """The tokens in a microbatch."""
        return self.sequences * self.sizes.sequence

    def link(self, name: str) -> Link:
        """The link that a group of a mesh dimension uses."""
        return self.hardware.link(self.mesh.crosses(name, self.hardware.gpus_per_node))


class StageWork(NamedTuple):
    """What `costs_of` finds, for each stage.

    sums: the time of the tensor-parallel collectives in F and B of one microbatch (ms). temporary: bytes
    beside those in Costs. update: the time of the optimizer's step (ms).
    """

    costs: Costs
    sums: list[float]
    temporary: list[float]
    update: list[float]


def parts_of(run: Run) -> tuple[Part, Part, Part]:
    """(the embedding, a layer, the head) for one microbatch on one rank."""
    known = run.sizes, run.tokens, run.mesh.tensor
    last = layer_work.head(*known)
    last = last.without_logits() if run.recompute else last
    last = last.w_at_once() if run.head_at_once else last
    return layer_work.embedding(*known), layer_work.layer(*known), last


def counts_of(run: Run, num_stages: int) -> tuple[int, ...]:
    """How many layers each stage gets. Raises ValueError for too few layers."""
    return _cut(run.sizes.num_layers, num_stages, _head_in_layers(run.sizes))


def _head_in_layers(sizes: ModelSizes) -> float:
    """The FLOPs of the head, in those of a layer."""
    tokens = float(sizes.sequence)
    one = 2.0 * sizes.layer_matrices * tokens + layer_work.attention_flops(sizes, tokens)
    return 2.0 * sizes.hidden * sizes.vocab * tokens / one


def vocabulary_parallelism(sizes: ModelSizes, num_stages: int) -> str:
    """A line that says what vocabulary parallelism would bring at most: all ranks share the head evenly."""
    head, counts = _head_in_layers(sizes), _cut(sizes.num_layers, num_stages, 0.0)
    *others, last = _cut(sizes.num_layers, num_stages, head)
    ratio = (max(counts) + head / num_stages) / max(*others, last + head)
    return (
        f"If {num_stages} ranks shared the head (vocabulary parallelism, arXiv:2411.05288; zbpp has none), a "
        f"step would take {min(1.0, ratio):.2f} of the time at best."
    )


@lru_cache(maxsize=512)
def _cut(num_layers: int, num_stages: int, head: float) -> tuple[int, ...]:
    return tuple(partition([1.0] * num_layers, num_stages, last=head))


def costs_of(run: Run, rank_of: Sequence[int]) -> StageWork:
    """The costs of the stages; rank_of[stage]: the placement. Memory in bytes."""
    num_stages = len(rank_of)
    first, layer, last = parts_of(run)
    stages = []
    for stage, count in enumerate(counts_of(run, num_stages)):
        parts = [(layer, float(count))]
        parts += [(first, 1.0)] if stage == 0 else []
        parts += [(last, 1.0)] if stage == num_stages - 1 else []
        stages.append(_Stage(run, parts))
    in_bytes = Costs(
        f=[each.f for each in stages],
        b=[each.b for each in stages],
        w=[each.w for each in stages],
        links=_links(run, rank_of),
        reduce=[_reduction(run, each.parameters) for each in stages],
    ).in_bytes(
        [each.saved for each in stages],
        [each.deferred for each in stages],
        [static_bytes(run, each.parameters) + each.buffers for each in stages],
    )
    return StageWork(
        in_bytes,
        [each.sums for each in stages],
        [each.temporary for each in stages],
        [_update(run, each.parameters) for each in stages],
    )


class _Stage:
    """The sums over a stage's parts."""

    def __init__(self, run: Run, parts: Sequence[tuple[Part, float]]) -> None:
        gpu, link = run.hardware.gpu, run.link("tensor")
        hidden = run.sizes.hidden * run.tokens * COMPUTE
        one_sum = link.all_reduce(hidden, run.mesh.tensor)
        in_f, in_b = (one_sum * sum(part.sums[op] * times for part, times in parts) for op in (0, 1))
        in_f += link.gather(sum(part.gathered for part, _ in parts), run.mesh.tensor)
        self.f = _time(gpu, [(part.f, times) for part, times in parts]) + in_f
        self.b = _time(gpu, [(part.b, times) for part, times in parts]) + in_b
        self.w = _time(gpu, [(part.w, times) for part, times in parts])
        self.sums = in_f + in_b
        self.parameters = sum(part.parameters * times for part, times in parts)
        self.buffers = sum(part.buffers * times for part, times in parts)
        self.deferred = sum(part.deferred * times for part, times in parts)
        self.saved = sum(part.saved * times for part, times in parts)
        self.temporary = max(part.temporary for part, _ in parts) + 4 * hidden
        self.temporary += _weight_gradient(run, max(part.largest for part, _ in parts))
        if run.recompute:
            layer, count = parts[0]
            self.b += _time(gpu, [(layer.f, count)]) + one_sum * layer.sums[0] * count
            self.sums += one_sum * layer.sums[0] * count
            self.saved -= count * (layer.saved - hidden)
            self.temporary += layer.saved


def _time(gpu: Gpu, parts: Sequence[tuple[Work, float]]) -> float:
    """In ms. A product takes the longer of its FLOPs and its weights' traffic; other kernels come on top."""
    return sum(
        times * (max(work.products / gpu.flops, work.weights / gpu.traffic) + work.traffic / gpu.traffic)
        for work, times in parts
    )


def _weight_gradient(run: Run, largest: float) -> float:
    """Temporary bytes of W: without shards it makes a matrix's gradient before it adds the gradient up."""
    return (COMPUTE + STORED) * largest if run.mesh.shard == 1 else 0.0


def static_bytes(run: Run, parameters: float) -> float:
    """The bytes of weights, gradients and AdamW's states for so many parameters on a rank."""
    if run.mesh.shard == 1:
        return parameters * (COMPUTE + 4 * STORED)  # weight; gradient, master and two states
    # The gathered weights and the gradients that microbatches add to are whole; the rest is in shards.
    return parameters * (COMPUTE + STORED + 3 * STORED / run.mesh.shard)


def _links(run: Run, rank_of: Sequence[int]) -> Links:
    """The links of the pipeline: between nodes, unless all GPUs of sender and receiver are in one node.

    What leaves a GPU's node goes over one card.
    """
    inside, between, of_node = run.hardware.inside, run.hardware.between, run.hardware.gpus_per_node
    neighbours = {pair for one, other in pairwise(rank_of) for pair in ((one, other), (other, one))}
    crossing = [
        (one, other)
        for one, other in sorted(neighbours)
        if one != other
        and min(one, other) * run.mesh.block // of_node
        != ((max(one, other) + 1) * run.mesh.block - 1) // of_node
    ]
    return Links.of_bytes(
        float(run.sizes.hidden * run.tokens * COMPUTE),
        bandwidth=inside.bandwidth,
        latency=inside.latency / 1e3,
        pairs=dict.fromkeys(crossing, (between.latency / 1e3, between.bandwidth)),
        shared=crossing,
    )


def _reduction(run: Run, parameters: float) -> float:
    """The time (ms) to sum a stage's gradients over replicas and shards, and to gather sharded weights."""
    mesh, size = run.mesh, parameters * STORED
    total = run.link("replicate").all_reduce(size / mesh.shard, mesh.replicate)
    if mesh.shard > 1:
        link = run.link("shard")
        total += link.gather(size, mesh.shard)
        total += link.gather(parameters * COMPUTE, mesh.shard)
    return total


def _update(run: Run, parameters: float) -> float:
    return _STEP_TRAFFIC * STORED * parameters / run.mesh.shard / run.hardware.gpu.traffic

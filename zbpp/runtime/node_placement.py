"""Which ranks share a node, and which groups of a mesh have to talk across nodes.

The mesh numbers processes with the pipeline outermost and the tensor dimension innermost, and torchrun
numbers the processes of one node one after another. So the processes of a tensor group sit side by side on a
node, and the pipeline, whose messages are few and small, goes from node to node:

    2 nodes of 4, pipeline 2 x replicate 2 x tensor 2:    node a: 0 1 | 2 3     node b: 4 5 | 6 7
    tensor groups 0-1, 2-3, 4-5, 6-7: inside a node       pipelines 0-4, 1-5, 2-6, 3-7: across nodes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product

from zbpp.runtime.mesh import DIMENSIONS, PIPELINE, SHARD, TENSOR

_WHY = {
    TENSOR: "every layer waits for the network several times",
    SHARD: "weights and gradients cross the network in each step, and in each microbatch with "
    "parallel.reshard=microbatch",
}


def spanning_groups(hosts: Sequence[str], degrees: Mapping[str, int]) -> dict[str, list[list[int]]]:
    """For each dimension of a mesh, its groups whose processes are on several nodes.

    hosts: of each process, in the order of their numbers. degrees: sizes by dimension; what is missing is 1,
    and the pipeline has the rest.
    """
    sizes = _sizes(len(hosts), degrees)
    found: dict[str, list[list[int]]] = {}
    for name in DIMENSIONS:
        groups = _groups(name, sizes)
        found[name] = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
    return found


def placement_warning(hosts: Sequence[str], degrees: Mapping[str, int]) -> str:
    """A line that says which groups talk across nodes though they should not, and what to change; or "".

    Tensor groups should stay on a node. Shards may span nodes only if no smaller degree does: they are
    reported where a node has room for the whole group.
    """
    sizes, spanning = _sizes(len(hosts), degrees), spanning_groups(hosts, degrees)
    per_node = min(Counter(hosts).values())
    for name in (TENSOR, SHARD):
        groups = spanning[name]
        has_room = name == TENSOR or sizes[SHARD] * sizes[TENSOR] <= per_node
        if groups and has_room:
            total = len(hosts) // sizes[name]
            example = groups[0]
            return (
                f"{len(groups)} of {total} {name} groups span nodes (processes {_text(example)} on "
                f"{', '.join(dict.fromkeys(hosts[rank] for rank in example))}): {_WHY[name]}. "
                f"{_way_out(name, hosts, sizes, per_node)}"
            )
    return ""


def _way_out(name: str, hosts: Sequence[str], sizes: Mapping[str, int], per_node: int) -> str:
    if list(hosts) != [host for host in dict.fromkeys(hosts) for _ in range(hosts.count(host))]:
        return (
            "The processes of a node are not numbered one after another: start torchrun once on each node, "
            "which numbers them so, or let the launcher fill node after node (Slurm: --distribution=block)"
        )
    together = sizes[TENSOR] * (sizes[SHARD] if name == SHARD else 1)
    if len(set(Counter(hosts).values())) > 1:
        return "The nodes have different numbers of processes: start as many on each"
    return (
        f"Choose parallel.{name} so that {'shard x tensor' if name == SHARD else 'it'} divides the "
        f"{per_node} processes of a node (now {together}): the pipeline takes the rest, across nodes"
    )


def _sizes(num_processes: int, degrees: Mapping[str, int]) -> dict[str, int]:
    sizes = {name: degrees.get(name, 1) for name in DIMENSIONS}
    rest = 1
    for name in DIMENSIONS[1:]:
        rest *= sizes[name]
    return sizes | {PIPELINE: num_processes // rest}


def _groups(name: str, sizes: Mapping[str, int]) -> list[list[int]]:
    """The process numbers of each group of one dimension."""
    others = [range(sizes[each]) for each in DIMENSIONS if each != name]
    groups = []
    for place in product(*others):
        given = dict(zip((each for each in DIMENSIONS if each != name), place, strict=True))
        groups.append([_number({**given, name: index}, sizes) for index in range(sizes[name])])
    return groups


def _number(place: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    number = 0
    for name in DIMENSIONS:
        number = number * sizes[name] + place[name]
    return number


def _text(ranks: Sequence[int]) -> str:
    if len(ranks) > 4:
        return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"
    return ", ".join(map(str, ranks))

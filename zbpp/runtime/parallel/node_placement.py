"""Which groups of a mesh have to talk across nodes, though they should not.

The mesh numbers processes with the pipeline outermost and the tensor dimension innermost, and torchrun
numbers the processes of one node one after another. So the processes of a tensor group sit side by side on a
node, and the pipeline, whose messages are few and small, goes from node to node:

    2 nodes of 4, pipeline 2 x replicate 2 x tensor 2:    node a: 0 1 | 2 3     node b: 4 5 | 6 7
    tensor groups 0-1, 2-3, 4-5, 6-7: inside a node       pipelines 0-4, 1-5, 2-6, 3-7: across nodes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from zbpp.runtime.parallel.mesh import DIMENSIONS, SHARD, TENSOR

_WHY = {
    TENSOR: "every layer waits for the network several times",
    SHARD: "weights and gradients cross the network in each step, and in each microbatch with "
    "parallel.reshard=microbatch",
}


def placement_warning(hosts: Sequence[str], degrees: Mapping[str, int]) -> str:
    """A line that says which groups talk across nodes though they should not, and what to change; or "".

    hosts: of each process, in the order of their numbers. degrees: sizes by dimension; what is missing is 1,
    and the pipeline has the rest. Tensor groups should stay on a node. Shards may span nodes only if no
    smaller degree does: they are reported where a node has room for the whole group.
    """
    sizes = [degrees.get(name, 1) for name in DIMENSIONS[1:]]
    mesh = torch.arange(len(hosts)).reshape(-1, *sizes)
    per_node = min(Counter(hosts).values())
    for name in (TENSOR, SHARD):
        groups = mesh.movedim(DIMENSIONS.index(name), -1).reshape(-1, degrees.get(name, 1)).tolist()
        spanning = [group for group in groups if len({hosts[rank] for rank in group}) > 1]
        together = degrees.get(TENSOR, 1) * (degrees.get(SHARD, 1) if name == SHARD else 1)
        if spanning and (name == TENSOR or together <= per_node):
            on = ", ".join(dict.fromkeys(hosts[rank] for rank in spanning[0]))
            return (
                f"{len(spanning)} of {len(groups)} {name} groups span nodes (the first one: {on}): "
                f"{_WHY[name]}. Start as many processes on each node, numbered node after node (torchrun "
                f"once on each; Slurm: --distribution=block), and choose parallel.{name} so that "
                f"{'shard x tensor' if name == SHARD else 'it'} divides the {per_node} of a node "
                f"(now {together}): the pipeline takes the rest, across nodes"
            )
    return ""

"""Small operations on FX graphs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg


def placeholders(graph: GraphModule) -> list[Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


def results(graph: GraphModule) -> list[Any]:
    """The nodes and Nones that the graph returns."""
    return list(graph.graph.output_node().args[0])  # type: ignore[arg-type]


def needed_by(nodes: Iterable[Node], stops: Iterable[Node] = ()) -> set[Node]:
    """The nodes and all nodes that they are computed from; the search ends at `stops` and leaves them out."""
    found, stopped = set[Node](), set(stops)
    pending = list(nodes)
    for node in pending:  # the list grows during the loop
        if node not in found and node not in stopped:
            found.add(node)
            pending += node.all_input_nodes
    return found


def extract(whole: GraphModule, inputs: Sequence[Node], outputs: Sequence[Any]) -> GraphModule:
    """The graph that computes `outputs` from `inputs`. Its nodes keep their names and their order."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    needed = needed_by((node for node in outputs if isinstance(node, Node)), stops=inputs)
    for node in whole.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[each] if isinstance(each, Node) else each for each in outputs])
    return GraphModule(whole, graph)


def call(graph: Graph, target: Any, *args: Any) -> Node:
    """A new node that calls an operation, with the fake tensor of its result."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda each: each.meta["val"]))
    return node


def tensor_of(node: Node) -> Tensor | None:
    """The fake tensor that stands for the node's value; None if it is no tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def viewed(node: Node) -> Node | None:
    """The node that this node is a view of, or one of several views; None if its memory is its own."""
    made_by: Any = node.args[0] if node.target is operator.getitem else node
    is_view = isinstance(made_by.target, torch._ops.OpOverload) and made_by.target.is_view
    return made_by.all_input_nodes[0] if is_view and made_by.all_input_nodes else None


def is_random(node: Node) -> bool:
    """Whether the node draws random numbers. Such a node must run once, in its turn."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())

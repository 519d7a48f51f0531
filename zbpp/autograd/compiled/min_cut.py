"""Cut a backward graph in two: B, which the previous stage waits for, and W.

W gets the products whose results are gradients of weights, or terms of these gradients. B gets the expensive
operations that the input gradients and the inputs of W's products are computed from. Every other operation
goes to B, to W or to both, so that the fewest bytes are held from B to W. This is the minimum cut of a
network in which holding a value of B costs its bytes.

    saved, dy --> [ B: mm mul mm ... ] --held--> [ W: mul | mm -> dW ]
                          |
                     input gradients

Parameters cost nothing, since they stay in memory anyway. Of several cuts with the same price the one nearest
to the weight gradients is taken: an operation that B can do without holding more is not left to W.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import networkx  # type: ignore[import-untyped]  # torch brings it along
import torch
from torch.fx import GraphModule, Node

from zbpp.autograd.compiled.fx_graphs import extract, is_random, needed_by, placeholders, tensor_of, viewed

aten = torch.ops.aten

# Operations that compute gradients of weights and are worth postponing.
PRODUCTS = {
    aten.mm.default,
    aten.bmm.default,
    aten.convolution_backward.default,
    aten.embedding_dense_backward.default,
}
# Not pointwise, but as cheap.
_CHEAP = {
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.full.default,
    operator.getitem,
}
_INFINITE: dict[str, float] = {}  # networkx: an edge without a capacity can't be cut


class BackwardCut(NamedTuple):
    """The two halves of a backward graph.

    B returns the input gradients, then the held values that it computes. W takes the held values, then the
    free placeholders that it uses, and returns the weight gradients.
    """

    b: GraphModule
    w: GraphModule
    held: list[Node]  # nodes of the backward graph whose values are held between B and W, placeholders first


def cut_backward(
    backward: GraphModule,
    input_gradients: Sequence[Node],
    weight_gradients: Sequence[Node],
    free: set[Node],
) -> BackwardCut:
    """Cut a backward graph in two. free: placeholders that cost nothing to hold."""
    held = _held(backward, input_gradients, weight_gradients, free)
    b_results = [*input_gradients, *(node for node in held if node.op != "placeholder")]
    b = extract(backward, _used(backward, b_results), b_results)
    used = [node for node in _used(backward, weight_gradients, stops=held) if node in free]
    w = extract(backward, [*held, *used], weight_gradients)
    return BackwardCut(b, w, held)


def _used(graph: GraphModule, nodes: Iterable[Node], stops: Iterable[Node] = ()) -> list[Node]:
    """The placeholders that the nodes are computed from."""
    needed = needed_by(nodes, stops)
    return [node for node in placeholders(graph) if node in needed]


def is_held(gradient: Node, held: Iterable[Node]) -> bool:
    """Whether this gradient, or the tensor that it is only a view of, is held: W has nothing to compute."""
    return _base(gradient) in set(held)


def separate_convolutions(graph: GraphModule) -> None:
    """Replace a node that computes all gradients of a convolution by two nodes, one for B and one for W."""
    for node in graph.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        mask = list(node.args[10])
        if not (mask[0] and any(mask[1:])):
            continue
        with graph.graph.inserting_after(node):
            other = graph.graph.node_copy(node)
        node.args = (*node.args[:10], [True, False, False])
        other.args = (*other.args[:10], [False, *mask[1:]])
        for user in list(node.users):
            if user.args[1]:
                user.args = (other, user.args[1])
    graph.recompile()


def contributions(gradient: Node) -> list[tuple[Node, bool]]:
    """(term, whether to transpose the term) for each term of a gradient. A tied weight has several terms."""
    found, pending = [], [(gradient, False)]
    while pending:
        node, turned = pending.pop()
        if _is_transpose(node):
            pending.append((node.args[0], not turned))  # type: ignore[arg-type]
        elif _is_sum(node):
            pending += [(term, turned) for term in reversed(node.args)]  # type: ignore[misc]
        else:
            found.append((node, turned))
    return found


def _is_transpose(node: Node) -> bool:
    """Whether the node swaps the last two dimensions."""
    if node.target is aten.permute.default:
        last = len(node.args[1]) - 1  # type: ignore[arg-type]
        return list(node.args[1]) == [*range(last - 1), last, last - 1]  # type: ignore[arg-type]
    return node.target is aten.t.default


def _is_sum(node: Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    shapes = [
        tensor.shape
        for each in (node, *node.args)
        if isinstance(each, Node) and (tensor := tensor_of(each)) is not None
    ]
    return len(shapes) == 3 and len(set(shapes)) == 1


def _held(
    backward: GraphModule, input_gradients: Sequence[Node], wanted: Sequence[Node], free: set[Node]
) -> list[Node]:
    if not wanted:
        return []
    needed = needed_by(input_gradients)
    products = {
        term
        for gradient in wanted
        for term, _ in contributions(gradient)
        if _origin(term).target in PRODUCTS and term not in needed
    }
    products |= {_origin(term) for term in products}
    network = _network(backward, wanted, products, needed | needed_by(_inputs(products)), free)
    _, (before, _) = networkx.minimum_cut(network, "source", "sink")
    chosen = [node for node in backward.graph.nodes if (node, "in") in before and (node, "out") not in before]
    held = [node for node in dict.fromkeys(map(_base, chosen)) if node not in free]
    return sorted(held, key=lambda node: node.op != "placeholder")


def _origin(node: Node) -> Node:
    """The node itself; for a node that picks one of several results, the node that computes them."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def _inputs(nodes: Iterable[Node]) -> set[Node]:
    return {each for node in nodes for each in node.all_input_nodes if each not in set(nodes)}


def _network(
    backward: GraphModule, wanted: Sequence[Node], products: set[Node], early: set[Node], free: set[Node]
) -> networkx.DiGraph:
    """The network whose minimum cut says which values are held.

    early: nodes from which B's results or the inputs of W's products are computed. The expensive ones among
    them are done in B only.
    """
    network = networkx.DiGraph()
    network.add_nodes_from(["source", "sink"])
    storages = {_storage(node): node for node in placeholders(backward)}
    for node in backward.graph.nodes:
        if node.op == "output":
            continue
        network.add_edge((node, "in"), (node, "out"), **_price(node, free, storages))
        if node.op == "placeholder" or (node in early and node not in products and not _is_cheap(node)):
            network.add_edge("source", (node, "in"), **_INFINITE)
        if node in products:
            network.add_edge((node, "in"), "sink", **_INFINITE)
        for user in node.users:
            if user.op != "output":
                network.add_edge((node, "out"), (user, "in"), **_INFINITE)
    for node in wanted:
        network.add_edge((node, "out"), "sink", **_INFINITE)
    return network


def _price(node: Node, free: set[Node], storages: dict[Any, Node]) -> dict[str, float]:
    """What it costs to hold the node's value: its bytes. Only tensors can be held."""
    tensor = tensor_of(node)
    if node.op == "get_attr" or node in free:
        return {"capacity": 0}
    if tensor is None:
        return _INFINITE
    owner = storages.get(_storage(node))
    if owner is None:
        return {"capacity": tensor.numel() * tensor.element_size()}
    return {"capacity": 0 if owner in free else tensor.untyped_storage().nbytes()}


def _storage(node: Node) -> int | None:
    tensor = tensor_of(node)
    return None if tensor is None else tensor.untyped_storage()._cdata


def _is_cheap(node: Node) -> bool:
    """Whether W may compute the node again."""
    target: Any = node.target
    if node.op == "get_attr" or target in _CHEAP:
        return True
    if not isinstance(target, torch._ops.OpOverload) or is_random(node):
        return False
    return target.is_view or torch.Tag.pointwise in target.tags


def _base(node: Node) -> Node:
    """The node itself; for a view of a whole tensor, that tensor: W makes the view again at no cost."""
    while (whole := viewed(node)) is not None and _size(whole) == _size(node):
        node = whole
    return node


def _size(node: Node) -> int | None:
    tensor = tensor_of(node)
    return None if tensor is None else tensor.numel()

"""Cut a backward graph in two: B, which the previous stage waits for, and W.

W gets the products whose results are gradients of weights, or terms of these gradients, and all that is
computed from them. B gets the rest: the input gradients, and the x and dy of W's products, which are held
from B to W.

    saved, dy --> [ B: mm mul mm ... ] --x, dy--> [ W: mm -> dW ]
                          |
                     input gradients

What W can compute from the x and dy alone (a bias's sum), and B does not need, is left to W. Parameters are
free to hold: they stay in memory anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from zbpp.autograd.compiled.adding import ADD_PRODUCT, ADD_ROWS
from zbpp.autograd.compiled.fx_graphs import (
    call,
    extract,
    is_random,
    needed_by,
    placeholders,
    results,
    tensor_of,
    viewed,
)

aten = torch.ops.aten

# Operations that compute gradients of weights and are worth postponing.
PRODUCTS = {
    aten.mm.default,
    aten.bmm.default,
    aten.convolution_backward.default,
    aten.embedding_dense_backward.default,
}


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
    """The values that are held between B and W."""
    of_b = needed_by(input_gradients)
    of_w = needed_by(wanted) - of_b
    late = [node for node in backward.graph.nodes if node in of_w]
    in_w: set[Node] = {
        _origin(term)
        for gradient in wanted
        for term, _ in contributions(gradient)
        if _origin(term).target in PRODUCTS and not of_b & {term, _origin(term)}
    }
    for node in late:
        if not in_w.isdisjoint(node.all_input_nodes):
            in_w.add(node)
    known = in_w | free | {_base(each) for node in in_w for each in node.all_input_nodes}
    for node in late:
        if (
            node.op == "call_function"
            and not is_random(node)
            and known >= set(map(_base, node.all_input_nodes))
        ):
            in_w.add(node)
            known.add(node)
    ends = [*(each for node in in_w for each in node.all_input_nodes), *wanted]
    held = {_base(each) for each in ends if each not in in_w and each.op != "get_attr"} - free
    ordered = [node for node in backward.graph.nodes if node in held]
    return sorted(ordered, key=lambda node: node.op != "placeholder")


def _origin(node: Node) -> Node:
    """The node itself; for a node that picks one of several results, the node that computes them."""
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def _base(node: Node) -> Node:
    """The node itself; for a view of a whole tensor, that tensor: W makes the view again at no cost."""
    while (whole := viewed(node)) is not None and _size(whole) == _size(node):
        node = whole
    return node


def _size(node: Node) -> int | None:
    tensor = tensor_of(node)
    return None if tensor is None else tensor.numel()


# ---- W adds to the gradients: a product is added in place, without a temporary, also to a wider gradient

# a product of matrices -> the operation that adds such a product to a tensor in place
_ADDING: dict[Any, Any] = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


def add_in_place(w: GraphModule, parameters: Sequence[Node], dtypes: Sequence[torch.dtype]) -> None:
    """Give the graph one more input per result, to which it adds the result. It then returns nothing.

    parameters: the new inputs have the shapes and strides of these nodes, and the dtypes of `dtypes`.
    """
    gradients = results(w)
    totals = _new_inputs(w, parameters, dtypes)
    for total, gradient in zip(totals, gradients, strict=True):
        for term, turned in contributions(gradient):
            _add(w.graph, total, term, turned)
    w.graph.output_node().args = ([],)
    w.graph.eliminate_dead_code()
    w.recompile()


def _new_inputs(w: GraphModule, like: Sequence[Node], dtypes: Sequence[torch.dtype]) -> list[Node]:
    inputs = placeholders(w)
    behind = inputs[-1].next if inputs else next(iter(w.graph.nodes))
    made = []
    with w.graph.inserting_before(behind):
        for position, (each, dtype) in enumerate(zip(like, dtypes, strict=True)):
            made.append(w.graph.placeholder(f"total_{position}"))
            value = each.meta["val"].detach()
            made[-1].meta["val"] = value.new_empty_strided(value.shape, value.stride(), dtype=dtype)
    return made


def _add(graph: Graph, total: Node, term: Node, turned: bool) -> None:
    """Add a term right after its node, so that the values that it is computed from can be freed."""
    where = term.next
    while where.op == "placeholder":
        where = where.next
    with graph.inserting_before(where):
        if term.target in _ADDING:
            _add_product(graph, total, term, turned)
        elif term.target is aten.embedding_dense_backward.default and not term.args[4]:  # by frequency
            rows, tokens, _, padding, _ = term.args
            call(graph, ADD_ROWS, total, rows, tokens, padding, turned)
        else:
            value = _transposed(graph, term) if turned else term
            call(graph, aten.copy_.default, total, call(graph, aten.add.Tensor, total, value))


def _add_product(graph: Graph, total: Node, term: Node, turned: bool) -> None:
    left, right = term.args
    if turned:  # (a b)^T = b^T a^T
        left, right = (_transposed(graph, each) for each in (right, left))
    is_wider = term.meta["val"].dtype != total.meta["val"].dtype
    call(graph, ADD_PRODUCT if is_wider else _ADDING[term.target], total, left, right)


def _transposed(graph: Graph, node: Any) -> Node:
    dims = list(range(node.meta["val"].dim()))
    return call(graph, aten.permute.default, node, [*dims[:-2], dims[-1], dims[-2]])

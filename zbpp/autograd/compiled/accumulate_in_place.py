"""Change W's graph so that it adds to the gradients: a product is added in place, without a temporary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from zbpp.autograd.compiled.backward_cut import contributions
from zbpp.autograd.compiled.fx_graphs import call, placeholders, results

aten = torch.ops.aten

# a product of matrices -> the operation that adds such a product to a tensor in place
_ADDING: dict[Any, Any] = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


def add_in_place(w: GraphModule, parameters: Sequence[Node]) -> None:
    """Give the graph one more input per result, to which it adds the result. It then returns nothing.

    parameters: the new inputs have the shapes, types and strides of these nodes.
    """
    gradients = results(w)
    totals = _new_inputs(w, parameters)
    for total, gradient in zip(totals, gradients, strict=True):
        for term, turned in contributions(gradient):
            _add(w.graph, total, term, turned)
    w.graph.output_node().args = ([],)
    w.graph.eliminate_dead_code()
    w.recompile()


def _new_inputs(w: GraphModule, like: Sequence[Node]) -> list[Node]:
    inputs = placeholders(w)
    behind = inputs[-1].next if inputs else next(iter(w.graph.nodes))
    made = []
    with w.graph.inserting_before(behind):
        for position, each in enumerate(like):
            made.append(w.graph.placeholder(f"total_{position}"))
            made[-1].meta["val"] = each.meta["val"].detach()
    return made


def _add(graph: Graph, total: Node, term: Node, turned: bool) -> None:
    """Add a term right after its node, so that the values that it is computed from can be freed."""
    where = term.next
    while where.op == "placeholder":
        where = where.next
    same_type = term.meta["val"].dtype == total.meta["val"].dtype
    with graph.inserting_before(where):
        if same_type and term.target in _ADDING:
            _add_product(graph, total, term, turned)
        elif same_type and term.target is aten.embedding_dense_backward.default and _is_simple(term):
            _add_rows(graph, total, *term.args[:2], turned=turned)
        else:
            value = _transposed(graph, term) if turned else term
            call(graph, aten.copy_.default, total, call(graph, aten.add.Tensor, total, value))


def _add_product(graph: Graph, total: Node, term: Node, turned: bool) -> None:
    left, right = term.args
    if turned:  # (a b)^T = b^T a^T
        left, right = (_transposed(graph, each) for each in (right, left))
    call(graph, _ADDING[term.target], total, left, right)


def _is_simple(embedding: Node) -> bool:
    """Whether the embedding has no padding index and is not scaled by frequency."""
    _, _, _, padding, by_frequency = embedding.args
    return bool(padding == -1 and not by_frequency)


def _add_rows(graph: Graph, total: Node, dy: Any, indices: Any, *, turned: bool) -> None:
    """turned: each token has a column of the parameter, not a row, as in LoRA of an embedding."""
    rows = call(graph, aten.reshape.default, dy, [-1, dy.meta["val"].shape[-1]])
    tokens = call(graph, aten.reshape.default, indices, [-1])
    added = _transposed(graph, rows) if turned else rows
    call(graph, aten.index_add_.default, total, 1 if turned else 0, tokens, added)


def _transposed(graph: Graph, node: Any) -> Node:
    dims = list(range(node.meta["val"].dim()))
    return call(graph, aten.permute.default, node, [*dims[:-2], dims[-1], dims[-2]])

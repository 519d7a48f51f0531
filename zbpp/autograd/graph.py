"""The walk over an autograd graph: which weight gradients can wait until W, and which B has to compute.

A SITE is a node that has a rule (a linear layer's, say) and one of whose operands leads to a trainable leaf
through a CHAIN of nodes with one edge each:

       dy, the output's gradient, is captured here
                               |
    outputs ... <- GeluBackward <- AddmmBackward <- ... <- inputs
                                     |   |
                           bias leaf +   +- TBackward <- weight leaf      (the chain)

A leaf waits only if ALL its uses are at sites. The gradient of every other trainable leaf is computed in B.
A chain COMPUTES unless all its nodes are views that views.py knows: a cast computes, say. W runs such a
chain by autograd.

BELOW a node are the nodes that its `next_functions` lead to: its operands were computed there.

This file is on the hot path of every B. The walk visits each node once. A node has a ROLE if it
is a leaf, belongs to a Python autograd Function, or has a rule: work that only these few nodes need is done
outside the loop over all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from zbpp.autograd.capture import (
    Add,
    HeldTensors,
    UnpackingAdd,
    saved_by,
    tensors_in,
    unpack,
    version_of,
)
from zbpp.autograd.hooks import has_node_hooks, hooked_nodes
from zbpp.autograd.node_roles import FUNCTION_NODES_LIVE, role_of_type, view_of_type
from zbpp.autograd.rules import Rule, capture_of_subclass
from zbpp.autograd.views import MATRIX_TRANSPOSE, View

Edge = tuple[Node, int]
_STRIDED = torch.strided

# The constructor of a NamedTuple is a Python function, and B makes a few NamedTuples per layer.
# new_tuple(WeightUse, values) makes an equal object without running Python code.
new_tuple: Any = tuple.__new__


class WeightUse(NamedTuple):
    """One use of a leaf: an operand of a site that leads to the leaf, and what W keeps for it.

    The site's node is not kept: it would keep the nodes below it alive, and all that these have saved.
    """

    leaf: Tensor
    held: HeldTensors
    add: Add
    chain: tuple[Edge, ...]  # from the operand's edge down to the leaf, the leaf excluded
    views: tuple[View, ...] | None  # W adds to this view of the leaf's gradient; None: a COMPUTING chain
    version: int  # sum of the versions of `held` when B captured them: see weight_grads.py
    rule: Rule

    def tensors(self) -> Iterator[Tensor]:
        """All tensors kept alive for this use, those that a computing chain has saved included."""
        yield from tensors_in(self.held)
        if self.views is None:
            for node, _ in self.chain:
                yield from saved_by(node)


class Survey(NamedTuple):
    """What the walk found, in the order of the walk. Leaves are AccumulateGrad nodes."""

    sites: list[Node]  # the nodes whose dy is to be captured; a node with two uses stands here twice
    uses: list[WeightUse]  # one per entry of `sites`; the uses of one leaf stand side by side
    has_sums: bool  # whether a leaf has several uses, or a chain that computes, or is of a subclass
    computed_in_b: dict[Any, Tensor]  # the other leaves, with their tensors
    functions: list[Any]  # nodes of Python autograd Functions; such a node is the Function's ctx
    hooked: dict[int, Any]  # of the leaves with hooks: id -> leaf


Candidate = tuple[Any, Rule, tuple[int, ...]]
"""A node, its rule, and operands of the node; at most one of these operands is deferred."""


def survey(
    roots: Iterable[Edge], stops: frozenset[Edge], wanted: set[int] | None, *, is_hooked: bool = False
) -> Survey:
    """Walk the graph below `roots` once, in time linear in its nodes.

    stops: edges that the walk doesn't follow (the inputs of B). wanted: ids of the leaf tensors whose
    gradients are asked for, None for all. is_hooked: whether nodes may have hooks. A node with hooks is no
    site: its hooks see the weight's gradient, and may change it.
    """
    nodes, revisited = _walk(roots, stops)
    leaves: dict[Any, Tensor] = {}
    weights: list[Candidate] = []
    biases: list[Candidate] = []
    functions = []
    for node, role in nodes:
        if role == "leaf":
            tensor = node.variable
            if tensor.requires_grad:  # a leaf that was frozen after F gets no gradient from autograd either
                leaves[node] = tensor
        elif role == "function":
            functions.append(node)
        elif not (is_hooked and has_node_hooks(node)):
            weights.append((node, role, role.weights))
            for operand in role.along:
                biases.append((node, role, (operand,)))
    if wanted is not None:
        # An empty leaf may be the dummy of a checkpoint or compiled call that uses a wanted leaf.
        leaves = {leaf: each for leaf, each in leaves.items() if id(each) in wanted or not each.numel()}
    hooked = hooked_nodes(leaves.values(), leaves)
    sites: list[Node] = []
    uses: list[WeightUse] = []
    walked = stops, revisited, set(revisited)
    has_sums = _defer(weights, leaves, walked, sites, uses)
    if biases:  # a bias waits only where its weight does: W holds that dy anyway
        deferred = set(sites)
        biases = [bias for bias in biases if bias[0] in deferred]
        has_sums = _defer(biases, leaves, walked, sites, uses) or has_sums
    return new_tuple(Survey, (sites, uses, has_sums, leaves, functions, hooked))


def leaves_below(roots: Iterable[Edge]) -> list[Tensor]:
    """The leaves of the graph below `roots`."""
    nodes, _ = _walk(roots, frozenset())
    return [node.variable for node, role in nodes if role == "leaf"]


def _walk(roots: Iterable[Edge], stops: frozenset[Edge]) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Walk from the roots. Returns (node, role) for each node that has a role, and the revisited nodes.

    A node is listed among the revisited once for each further edge that leads to it. Being a root counts as
    the first edge; an edge in `stops` always counts as a further one. Apart from the pass itself, the loop
    over all nodes is what B costs.
    """
    nodes: list[Any] = []
    seen: set[Any] = {None}
    for edge in roots:
        if edge not in stops and edge[0] not in seen:
            seen.add(edge[0])
            nodes.append(edge[0])
    stopped = {node for node, _ in stops if node not in seen}
    seen |= stopped
    revisited = []
    for node in nodes:  # the list grows during the loop
        for edge in node.next_functions:
            below = edge[0]
            if below not in seen:
                seen.add(below)
                nodes.append(below)
            elif below in stopped and edge not in stops:  # the edge is to another output of this node
                stopped.remove(below)
                nodes.append(below)
            else:
                revisited.append(below)
    roles = role_of_type
    return [(node, role) for node in nodes if (role := roles[type(node)]) is not None], revisited


def _defer(
    candidates: list[Candidate],
    leaves: dict[Any, Tensor],
    walked: tuple[frozenset[Edge], list[Any], set[Any]],
    sites: list[Node],
    uses: list[WeightUse],
) -> bool:
    """Move each leaf that can wait from `leaves` to `sites` and `uses`. Returns Survey.has_sums.

    A leaf can wait if all its uses are captured. Of each candidate one operand is captured: the first that
    leads to one of `leaves` and that its rule doesn't decline. walked: the stops, the revisited nodes as a
    list and as a set.
    """
    stops, revisited, revisited_set = walked
    shared: dict[Any, list[tuple[Node, WeightUse]]] = {}
    for site, rule, operands in candidates:
        below = site.next_functions
        for operand in operands:
            leaf, chain, views, is_only_use = _follow(below[operand], stops, revisited_set)
            tensor = leaves.get(leaf)
            if tensor is None:
                continue
            if type(tensor) is nn.Parameter or not hasattr(tensor, "__tensor_flatten__"):
                use = _capture(site, rule, operand, tensor, chain, views)
            else:
                use, is_only_use = _capture_subclass(site, rule, operand, tensor, chain, views), False
            if use is None:
                continue
            if is_only_use:
                del leaves[leaf]
                sites.append(site)
                uses.append(use)
            else:
                shared.setdefault(leaf, []).append((site, use))
            break
    return bool(shared) and _defer_shared(shared, leaves, revisited, sites, uses)


def _capture(
    site: Any, rule: Rule, operand: int, leaf: Tensor, chain: tuple[Edge, ...], views: Views
) -> WeightUse | None:
    """Take from a site what W needs for this operand; None if its rule declines."""
    if rule.ready is not None and not rule.ready(site):
        return None
    direct = rule.direct.get(operand)
    raw: Any = None if direct is None else getattr(site, direct.raw_attribute)
    hook = None if raw is None else raw.unpack_hook
    if direct is not None and (hook is None or hook is unpack):
        add = direct.add
        if views and views[-1] is MATRIX_TRANSPOSE:
            add, views = direct.add_transposed, views[:-1]
        if hook is None or raw.data.stays:
            # detach() shares the version with the saved tensor; .data would not.
            x = getattr(site, direct.attribute).detach()
            if x.layout is not _STRIDED:
                return None
        else:
            x = raw.data
            x.check()
            add = UnpackingAdd(add)
        held: HeldTensors = (x,)
        version = x._version
    else:
        capture = rule.capture(site, operand)
        if capture is None:
            return None
        held, add = capture
        version = version_of(held)
    return new_tuple(WeightUse, (leaf, held, add, chain, views, version, rule))


def _capture_subclass(
    site: Any, rule: Rule, operand: int, leaf: Tensor, chain: tuple[Edge, ...], views: Views
) -> WeightUse | None:
    """`_capture` for a leaf of a subclass of Tensor; None unless what is registered for it captures it."""
    capture = capture_of_subclass(site, rule, operand, leaf, views)
    if capture is None or not (rule.ready is None or rule.ready(site)):
        return None
    return WeightUse(leaf, capture.held, capture.add, chain, (), version_of(capture.held), rule)


def _defer_shared(
    shared: dict[Any, list[tuple[Node, WeightUse]]],
    leaves: dict[Any, Tensor],
    revisited: list[Any],
    sites: list[Node],
    uses: list[WeightUse],
) -> bool:
    """Let a leaf wait if all its uses were captured. Returns whether any leaf waits."""
    complete = [leaf for leaf, pairs in shared.items() if _are_all_uses(leaf, pairs, revisited)]
    for leaf in complete:
        del leaves[leaf]
        for site, use in shared[leaf]:
            sites.append(site)
            uses.append(use)
    return bool(complete)


def _are_all_uses(leaf: Node, pairs: list[tuple[Node, WeightUse]], revisited: list[Any]) -> bool:
    """Whether every edge into the leaf and into its chains belongs to one of these uses.

    A gradient captured at a leaf collects every path to it. If one use of a leaf were computed in B and
    another in W, the second would be counted twice.
    """
    nodes = {leaf}
    for _, use in pairs:
        nodes.update([node for node, _ in use.chain])
    # The walk met len(nodes) + revisits edges into these nodes. Of these edges len(nodes) - 1 lead from one
    # of the nodes to the next, towards the leaf. The other revisits + 1 come from outside: if there are as
    # many uses, every edge from outside belongs to a use.
    return sum([each in nodes for each in revisited]) == len(pairs) - 1


Views = tuple[View, ...] | None
_Path = tuple[Node | None, tuple[Edge, ...], Views, bool]
"""The leaf that a chain ends at, or None; the chain; its views, None if it computes; whether this is the
leaf's only use and the chain computes nothing."""
_NO_LEAF: _Path = None, (), None, False


def _follow(edge: Any, stops: frozenset[Edge], revisited: set[Any]) -> _Path:
    """The chain that starts with an edge, and the leaf at its end.

    A chain never passes a node that has a rule. Otherwise, where no input needs grad (stage 0), the
    activation between Embedding and Linear would pass for a chain to the embedding's weight. A chain that
    computes never ends at an empty leaf: that is the dummy of a checkpoint or compiled call, which B runs.
    """
    chain: tuple[Edge, ...] = ()
    views: Views = ()
    is_only_use = True
    roles, views_of = role_of_type, view_of_type
    while (node := edge[0]) is not None:
        if node in revisited:
            is_only_use = False
        role = roles[type(node)]
        if role == "function" and not chain and not FUNCTION_NODES_LIVE:
            break
        if role is not None and role != "function":
            if role != "leaf" or (views is None and not node.variable.numel()):
                break
            return node, chain, views, is_only_use and views is not None
        if edge in stops:
            break
        below = node.next_functions
        if len(below) != 1:
            below = [each for each in below if each[0] is not None]
            if len(below) != 1:
                break
        if views is not None:
            view = views_of[type(node)]
            if view is None:
                views = None
            else:
                views = (view if type(view) is View else view(*edge), *views)
        chain = (*chain, edge)
        edge = below[0]
    return _NO_LEAF

"""The walk: which weight gradients of an autograd graph can wait, and which are computed in B.

A SITE is a node with a rule (a linear layer, say) one of whose operands leads to a trainable
leaf through a CHAIN of nodes with one edge each:

                           dy captured here
                               |
    outputs ... <- GeluBackward <- AddmmBackward <- ... <- inputs
                                     |   |
                           bias leaf +   +- TBackward <- weight leaf      (the chain)

A leaf is deferred only if ALL its uses are at sites.

This file is on the hot path of every B: the walk visits each node once, and the loop that
touches them all does nothing that can be done for the few that matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from zbpp.autograd.rules import Add, Held, Rule, rule_of
from zbpp.autograd.views import MATRIX_TRANSPOSE, VIEWS, View

Edge = tuple[Node, int]


class Use(NamedTuple):
    """One operand of a site that leads to a leaf, and what W keeps for it.

    Not the site itself: it holds the nodes below it, and they what they have.
    """

    held: Held
    add: Add
    chain: tuple[Edge, ...]  # from the operand's edge down to, not including, the leaf
    views: tuple[View, ...] | None  # of the leaf's gradient, what W adds to; None if the chain computes


class Survey(NamedTuple):
    """What a walk found. Leaves are AccumulateGrad nodes; everything in the order of the walk."""

    deferred: dict[Node, list[tuple[Node, Use]]]  # leaf: (site, use)
    eager: list[Node]
    functions: list[Any]  # nodes of Python autograd Functions: each is its own ctx


def survey(roots: Iterable[Edge], stops: frozenset[Edge], wanted: set[int] | None) -> Survey:
    """Walk the graph below `roots` once, linear in its nodes.

    stops: edges not to be followed (the inputs of B). wanted: ids of the leaf tensors whose
    gradients are asked for, None for all.
    """
    nodes = _walk([root for root in roots if root not in stops], stops)
    leaves = nodes.leaves
    if wanted is not None:
        # An empty leaf is a checkpoint's dummy: what is wanted may lie inside.
        leaves = [leaf for leaf in leaves if id(variable(leaf)) in wanted or not variable(leaf).numel()]
    choices = ((site, rule, rule.weights) for site, rule in nodes.sites)
    deferred = _deferrable(choices, leaves, stops, nodes.repeats)
    if not any(rule.along for _, rule in nodes.sites):
        return Survey(deferred, [leaf for leaf in leaves if leaf not in deferred], nodes.functions)
    # A bias waits only where its weight does: dy is held there anyway.
    split = {site for uses in deferred.values() for site, _ in uses}
    choices = ((site, rule, (each,)) for site, rule in nodes.sites if site in split for each in rule.along)
    others = [leaf for leaf in leaves if leaf not in deferred]
    deferred |= _deferrable(choices, others, stops, nodes.repeats)
    return Survey(deferred, [leaf for leaf in others if leaf not in deferred], nodes.functions)


def kind(node: Node) -> str:
    """`AddmmBackward0`: what a rule is registered for."""
    return type(node).__name__


def variable(leaf: Any) -> Tensor:
    """The leaf tensor of an AccumulateGrad node."""
    tensor: Tensor = leaf.variable
    return tensor


class _Nodes(NamedTuple):
    leaves: list[Node]
    sites: list[tuple[Node, Rule]]
    functions: list[Any]
    repeats: dict[Node | None, int]  # edges to a node besides the first, outputs counting as edges


def _walk(roots: Iterable[Edge], stops: frozenset[Edge]) -> _Nodes:
    """Sort out the nodes below the roots. The loop over all of them is what B costs beside the pass."""
    # A node with one output is stopped at by having been seen: only others cost a look-up per edge.
    barriers = {edge for edge in stops if _num_outputs(edge[0]) > 1}
    pending = list(dict.fromkeys(node for node, _ in roots))
    seen: set[Node | None] = {None, *pending, *(node for node, nr in stops if (node, nr) not in barriers)}
    repeats: dict[Node | None, int] = {}
    leaves, sites, functions = [], [], []
    edges: Any
    for node in pending:  # which grows meanwhile
        role = _ROLES[type(node)]
        if role is not None:
            if role == "leaf":
                leaves.append(node)
                continue
            if role == "function":
                functions.append(node)
            else:
                sites.append((node, role))
        edges = node.next_functions
        if barriers:
            edges = [edge for edge in edges if edge not in barriers]
        for below, _ in edges:
            if below in seen:
                repeats[below] = repeats.get(below, 0) + 1
            else:
                seen.add(below)
                pending.append(below)
    return _Nodes(leaves, sites, functions, repeats)


def _num_outputs(node: Any) -> int:
    return len(node._input_metadata)


class _Roles(dict[type, Any]):
    """type of node -> "leaf", "function" (of Python), its rule, or None: a fact, looked up once."""

    def __missing__(self, cls: type) -> Any:
        if cls.__name__ == "AccumulateGrad":
            self[cls] = "leaf"
        else:
            self[cls] = rule_of(cls.__name__) or ("function" if issubclass(cls, BackwardCFunction) else None)
        return self[cls]


_ROLES = _Roles()


def is_leaf(node: Node) -> bool:
    """Whether gradients that reach this node accumulate into a leaf tensor."""
    return _ROLES[type(node)] == "leaf"


def _deferrable(
    choices: Iterable[tuple[Node, Rule, tuple[int, ...]]],
    leaves: list[Node],
    stops: frozenset[Edge],
    repeats: dict[Node | None, int],
) -> dict[Node, list[tuple[Node, Use]]]:
    """The leaves all of whose uses are among these operands, taking of each site the first that can wait."""
    found: dict[Node | None, list[tuple[Node, Use]]] = {leaf: [] for leaf in leaves if _is_plain(leaf)}
    for site, rule, operands in choices:
        below = site.next_functions
        for operand in operands:
            leaf, chain, views = _follow(below[operand], stops)
            if leaf not in found or (rule.ready is not None and not rule.ready(site)):
                continue
            kept = rule.kept.get(operand)
            if kept is not None and getattr(site, kept.raw).unpack_hook is None:
                held: Held = (getattr(site, kept.saved).detach(),)
                add = kept.add
                if views and views[-1] is MATRIX_TRANSPOSE:
                    add, views = kept.transposed, views[:-1]
            else:
                capture = rule.capture(site, operand)
                if capture is None:
                    continue
                held, add = capture
            found[leaf].append((site, Use(held, add, chain, views)))
            break
    return {leaf: uses for leaf, uses in found.items() if leaf and uses and _are_all(uses, leaf, repeats)}


def _is_plain(leaf: Any) -> bool:
    """Whether W knows how to add to this leaf: subclasses (DTensor, quantised ones) are computed in B.

    So are complex leaves, whose products would need conjugates.
    """
    tensor = leaf.variable
    if tensor.is_complex():
        return False
    return type(tensor) is nn.Parameter or not hasattr(tensor, "__tensor_flatten__")


def _follow(
    edge: Any, stops: frozenset[Edge]
) -> tuple[Node | None, tuple[Edge, ...], tuple[View, ...] | None]:
    """The leaf that an edge leads to by single edges, with the chain on the way; None if it doesn't.

    A chain never passes a node that has a rule: on stage 0 an activation, too, leads to
    parameters only (Embedding -> Linear).
    """
    chain: tuple[Edge, ...] = ()
    views: tuple[View, ...] | None = ()
    while edge[0] is not None and edge not in stops:
        node = edge[0]
        role = _ROLES[type(node)]
        if role == "leaf":
            return node, chain, views
        if role is not None and role != "function":
            break
        below = node.next_functions
        if len(below) != 1:
            below = [each for each in below if each[0] is not None]
            if len(below) != 1:
                break
        if views is not None:
            make_view = VIEWS.get(type(node).__name__)
            views = None if make_view is None else (make_view(*edge), *views)
        chain = (*chain, edge)
        edge = below[0]
    return None, (), None


def _are_all(uses: list[tuple[Node, Use]], leaf: Node, repeats: dict[Node | None, int]) -> bool:
    """Whether every edge into the leaf and into its chains belongs to one of these uses.

    A gradient captured at a leaf collects every path to it, so a leaf with one eager use
    besides a deferred one would be counted twice.
    """
    if len(uses) == 1:  # nearly always: short for what follows
        for node, _ in uses[0][1].chain:
            if node in repeats:
                return False
        return leaf not in repeats
    nodes = {leaf}
    for _, use in uses:
        nodes.update([node for node, _ in use.chain])
    num_repeats = sum([repeats[node] for node in nodes if node in repeats])
    # All edges into these nodes against those that we know: one per use, one below each chain node.
    return len(nodes) + num_repeats == len(uses) + len(nodes) - 1

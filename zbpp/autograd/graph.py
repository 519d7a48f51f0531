"""The walk: which weight gradients of an autograd graph can wait, and which are computed in B.

A SITE is a node with a rule (a linear layer, say) one of whose operands leads to a trainable
leaf through a CHAIN of nodes with one edge each:

                           dy captured here
                               |
    outputs ... <- GeluBackward <- AddmmBackward <- ... <- inputs
                                     |   |
                           bias leaf +   +- TBackward <- weight leaf      (the chain)

A leaf is deferred only if ALL its uses are at sites.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from zbpp.autograd.rules import RULES, Capture

Edge = tuple[Node, int]


class Use(NamedTuple):
    """One operand of a site that leads to a leaf."""

    site: Node
    chain: tuple[Edge, ...]  # from the operand's edge down to, not including, the leaf
    capture: Capture


class Survey(NamedTuple):
    """What a walk found; leaves as AccumulateGrad nodes, in the order of the walk."""

    deferred: dict[Node, list[Use]]
    eager: list[Node]


def survey(roots: Iterable[Edge], stops: set[Edge], wanted: set[int] | None) -> Survey:
    """Walk the graph below `roots` once, linear in its nodes.

    stops: edges not to be followed (the inputs of B). wanted: ids of the leaf tensors whose
    gradients are asked for, None for all.
    """
    num_edges_to = _walk(roots, stops)
    leaves = [
        node for node in num_edges_to if is_leaf(node) and (wanted is None or id(variable(node)) in wanted)
    ]
    sites = [node for node in num_edges_to if kind(node) in RULES]
    found = _uses(((site, RULES[kind(site)].weights) for site in sites), stops)
    deferred = {leaf: found[leaf] for leaf in leaves if _all_uses_are(found[leaf], leaf, num_edges_to)}
    # A bias waits only where its weight does: dy is held there anyway.
    split = dict.fromkeys(use.site for uses in deferred.values() for use in uses)
    along = [(site, (operand,)) for site in split for operand in RULES[kind(site)].along]
    found = _uses(along, stops)
    deferred |= {
        leaf: found[leaf]
        for leaf in leaves
        if leaf not in deferred and _all_uses_are(found[leaf], leaf, num_edges_to)
    }
    return Survey(deferred, [leaf for leaf in leaves if leaf not in deferred])


def kind(node: Node) -> str:
    """`AddmmBackward0`: what a rule is registered for."""
    return type(node).__name__


def is_leaf(node: Node) -> bool:
    """Whether gradients that reach this node accumulate into a leaf tensor."""
    return kind(node) == "AccumulateGrad"


def variable(leaf: Any) -> Tensor:
    """The leaf tensor of an AccumulateGrad node."""
    tensor: Tensor = leaf.variable
    return tensor


def _walk(roots: Iterable[Edge], stops: set[Edge]) -> dict[Node, int]:
    """Every node reached, in a fixed order, with the number of edges that lead to it."""
    num_edges_to: dict[Node, int] = {}
    pending = [edge for edge in roots if edge not in stops]
    while pending:
        node, _ = pending.pop()
        if node not in num_edges_to:
            num_edges_to[node] = 0
            pending += _edges_below(node, stops)
        num_edges_to[node] += 1
    return num_edges_to


def _edges_below(node: Node, stops: set[Edge]) -> list[Edge]:
    return [
        (below, nr) for below, nr in node.next_functions if below is not None and (below, nr) not in stops
    ]


def _uses(operands: Iterable[tuple[Node, tuple[int, ...]]], stops: set[Edge]) -> dict[Node, list[Use]]:
    """leaf -> its uses, taking of each site the first operand that can wait."""
    found: dict[Node, list[Use]] = defaultdict(list)
    for site, choices in operands:
        for leaf, use in _first_use(site, choices, stops):
            found[leaf].append(use)
    return found


def _first_use(site: Node, choices: tuple[int, ...], stops: set[Edge]) -> Iterator[tuple[Node, Use]]:
    for operand in choices:
        leaf, chain = _follow(site.next_functions[operand], stops)
        if leaf is None:
            continue
        capture = RULES[kind(site)].capture(site, operand)
        if capture is not None:
            yield leaf, Use(site, chain, capture)
            return


def _follow(edge: tuple[Node | None, int], stops: set[Edge]) -> tuple[Node | None, tuple[Edge, ...]]:
    """The leaf that an edge leads to by single edges, and the chain on the way; None if it doesn't.

    A chain never passes a node that has a rule: on stage 0 an activation, too, leads to
    parameters only (Embedding -> Linear).
    """
    chain: list[Edge] = []
    while edge[0] is not None and edge not in stops:
        node = edge[0]
        if is_leaf(node):
            return node, tuple(chain)
        below = [each for each in node.next_functions if each[0] is not None]
        if len(below) != 1 or kind(node) in RULES:
            break
        chain.append((node, edge[1]))
        edge = below[0]
    return None, ()


def _all_uses_are(uses: list[Use], leaf: Node, num_edges_to: dict[Node, int]) -> bool:
    """Whether every edge into the leaf and into its chains belongs to one of these uses.

    A gradient captured at a leaf collects every path to it, so a leaf with one eager use
    besides a deferred one would be counted twice.
    """
    chain_nodes = {node for use in uses for node, _ in use.chain}
    edges = num_edges_to[leaf] + sum(num_edges_to[node] for node in chain_nodes)
    return bool(uses) and edges == len(uses) + len(chain_nodes)

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

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from zbpp.autograd.hooks import has_node_hooks
from zbpp.autograd.rules import Add, Held, Packed, Rule, rule_of, saved_by, version_of
from zbpp.autograd.views import MATRIX_TRANSPOSE, VIEWS, View

Edge = tuple[Node, int]
_STRIDED = torch.strided

make: Any = tuple.__new__
"""make(NamedTuple, values): one without a Python call. B makes a few per layer."""


class Use(NamedTuple):
    """One operand of a site that leads to a leaf, and what W keeps for it.

    Not the site itself: it holds the nodes below it, and they what they have.
    """

    leaf: Tensor
    held: Held
    add: Add
    chain: tuple[Edge, ...]  # from the operand's edge down to, not including, the leaf
    views: tuple[View, ...] | None  # of the leaf's gradient, what W adds to; None if the chain computes
    version: int  # of all that is held, when it was captured: see weight_grads.py
    rule: Rule

    def tensors(self) -> Iterator[Tensor]:
        """All that is kept for this use: what is held, and what a chain that computes has saved."""
        for each in self.held:
            yield from each.tensors() if isinstance(each, Packed) else (each,)
        if self.views is None:
            for node, _ in self.chain:
                yield from saved_by(node)


class Survey(NamedTuple):
    """What a walk found. Leaves are AccumulateGrad nodes; everything in the order of the walk."""

    sites: list[Node]  # where dy is to be captured,
    uses: list[Use]  # and what for; those of one leaf side by side
    has_sums: bool  # whether a leaf has several uses, or a chain that computes
    eager: dict[Any, Tensor]  # the leaves that can't wait, with their tensors
    functions: list[Any]  # nodes of Python autograd Functions: each is its own ctx


Choice = tuple[Any, Rule, tuple[int, ...]]  # a site, and the operands of which one may wait


def survey(
    roots: Iterable[Edge], stops: frozenset[Edge], wanted: set[int] | None, *, is_hooked: bool = False
) -> Survey:
    """Walk the graph below `roots` once, linear in its nodes.

    stops: edges not to be followed (the inputs of B). wanted: ids of the leaf tensors whose
    gradients are asked for, None for all. is_hooked: whether nodes may have hooks. Such a node is no site:
    its hooks see, and may change, the weight's gradient.
    """
    nodes, again = _walk(roots, stops)
    leaves: dict[Any, Tensor] = {}
    choices: list[Choice] = []
    biases: list[Choice] = []
    functions = []
    for node, role in nodes:
        if role == "leaf":
            tensor = node.variable
            if tensor.requires_grad:  # autograd, too, passes over a leaf that was frozen after F
                leaves[node] = tensor
        elif role == "function":
            functions.append(node)
        elif not (is_hooked and has_node_hooks(node)):
            choices.append((node, role, role.weights))
            for operand in role.along:
                biases.append((node, role, (operand,)))
    if wanted is not None:
        # An empty leaf is a checkpoint's dummy: what is wanted may lie inside.
        leaves = {leaf: each for leaf, each in leaves.items() if id(each) in wanted or not each.numel()}
    sites: list[Node] = []
    uses: list[Use] = []
    walked = stops, again, set(again)
    has_sums = _defer(choices, leaves, walked, sites, uses)
    if biases:  # wait only where their weights do: dy is held there anyway
        split = set(sites)
        biases = [choice for choice in biases if choice[0] in split]
        has_sums = _defer(biases, leaves, walked, sites, uses) or has_sums
    return make(Survey, (sites, uses, has_sums, leaves, functions))


def kind(node: Node) -> str:
    """`AddmmBackward0`: what a rule is registered for."""
    return type(node).__name__


def variable(leaf: Any) -> Tensor:
    """The leaf tensor of an AccumulateGrad node."""
    tensor: Tensor = leaf.variable
    return tensor


def _walk(roots: Iterable[Edge], stops: frozenset[Edge]) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """The nodes below the roots that have a role, with it; and each node as often as it was met again.

    The roots count as edges. The loop over all nodes is what B costs beside the pass.
    """
    nodes: list[Any] = []
    seen: set[Any] = {None}
    for edge in roots:
        if edge not in stops and edge[0] not in seen:
            seen.add(edge[0])
            nodes.append(edge[0])
    stopped = {node for node, _ in stops if node not in seen}
    seen |= stopped
    again = []
    for node in nodes:  # which grow meanwhile
        for edge in node.next_functions:
            below = edge[0]
            if below not in seen:
                seen.add(below)
                nodes.append(below)
            elif below in stopped and edge not in stops:  # reached by another of its outputs
                stopped.remove(below)
                nodes.append(below)
            else:
                again.append(below)
    roles = _ROLES
    return [(node, role) for node in nodes if (role := roles[type(node)]) is not None], again


class _Roles(dict[type, Any]):
    """type of node -> "leaf", "function" (of Python), its rule, or None: a fact, looked up once."""

    def __missing__(self, cls: type) -> Any:
        if cls.__name__ == "AccumulateGrad":
            self[cls] = "leaf"
        else:
            self[cls] = rule_of(cls.__name__) or ("function" if issubclass(cls, BackwardCFunction) else None)
        return self[cls]


_ROLES = _Roles()


def _functions_live() -> bool:
    """Whether the node of a Python Function lives as long as Python has it. In torch 2.11 it does not."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.clone()

    node: Any = Same.apply(torch.empty(0, requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]  # torch's
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


# W starts a chain that computes at its head, when the graph is gone.
_FUNCTIONS_LIVE = _functions_live()


class _Makers(dict[type, Any]):
    """type of node -> its view, or the maker of it, or None: likewise."""

    def __missing__(self, cls: type) -> Any:
        self[cls] = VIEWS.get(cls.__name__)
        return self[cls]


_MAKERS = _Makers()


def is_leaf(node: Node) -> bool:
    """Whether gradients that reach this node accumulate into a leaf tensor."""
    return _ROLES[type(node)] == "leaf"


def _defer(
    choices: list[Choice],
    leaves: dict[Any, Tensor],
    walked: tuple[frozenset[Edge], list[Any], set[Any]],
    sites: list[Node],
    uses: list[Use],
) -> bool:
    """Move from `leaves` to `sites` and `uses` those all of whose uses are among these choices.

    Of each site the first operand that can wait is taken. walked: stops, the nodes met again, the set
    of them. Returns whether there are sums: see Survey.
    """
    stops, again, repeated = walked
    together: dict[Any, list[tuple[Node, Use]]] = {}
    for site, rule, operands in choices:
        below = site.next_functions
        for operand in operands:
            leaf, chain, views, is_alone = _follow(below[operand], stops, repeated)
            if leaf not in leaves or (rule.ready is not None and not rule.ready(site)):
                continue
            tensor = leaves[leaf]
            kept = rule.kept.get(operand)
            if kept is not None and getattr(site, kept.raw).unpack_hook is None:
                x = getattr(site, kept.saved).detach()  # .data would not share its version
                if x.layout is not _STRIDED:
                    continue
                held: Held = (x,)
                version = x._version
                add = kept.add
                if views and views[-1] is MATRIX_TRANSPOSE:
                    add, views = kept.transposed, views[:-1]
            else:
                capture = rule.capture(site, operand)
                if capture is None:
                    continue
                held, add = capture
                version = version_of(held)
            if not _is_plain(tensor):
                continue
            use = make(Use, (tensor, held, add, chain, views, version, rule))
            if is_alone:
                del leaves[leaf]
                sites.append(site)
                uses.append(use)
            else:
                together.setdefault(leaf, []).append((site, use))
            break
    if not together:
        return False
    complete = [leaf for leaf, pairs in together.items() if _are_all(leaf, pairs, again)]
    for leaf in complete:
        del leaves[leaf]
        for site, use in together[leaf]:
            sites.append(site)
            uses.append(use)
    return bool(complete)


def _is_plain(tensor: Tensor) -> bool:
    """Whether W knows how to add to this leaf: subclasses (DTensor, quantised ones) are computed in B."""
    return type(tensor) is nn.Parameter or not hasattr(tensor, "__tensor_flatten__")


def _follow(edge: Any, stops: frozenset[Edge], repeated: set[Any]) -> _Way:
    """The leaf that an edge leads to by single edges.

    A chain never passes a node that has a rule: on stage 0 an activation, too, leads to
    parameters only (Embedding -> Linear).
    """
    chain: tuple[Edge, ...] = ()
    views: tuple[View, ...] | None = ()
    is_alone = True
    roles, makers = _ROLES, _MAKERS
    while (node := edge[0]) is not None:
        if node in repeated:
            is_alone = False
        role = roles[type(node)]
        if role == "function" and not chain and not _FUNCTIONS_LIVE:
            break
        if role is not None and role != "function":
            return (node, chain, views, is_alone and views is not None) if role == "leaf" else _NOWHERE
        if edge in stops:
            break
        below = node.next_functions
        if len(below) != 1:
            below = [each for each in below if each[0] is not None]
            if len(below) != 1:
                break
        if views is not None:
            view = makers[type(node)]
            if view is None:
                views = None
            else:
                views = (view if type(view) is View else view(*edge), *views)
        chain = (*chain, edge)
        edge = below[0]
    return _NOWHERE


# Leaf or None, chain, views, and whether the leaf has this use only and the chain computes nothing
_Way = tuple[Node | None, tuple[Edge, ...], tuple[View, ...] | None, bool]
_NOWHERE: _Way = None, (), None, False


def _are_all(leaf: Node, pairs: list[tuple[Node, Use]], again: list[Any]) -> bool:
    """Whether every edge into the leaf and into its chains belongs to one of these uses.

    A gradient captured at a leaf collects every path to it, so a leaf with one eager use
    besides a deferred one would be counted twice.
    """
    nodes = {leaf}
    for _, use in pairs:
        nodes.update([node for node, _ in use.chain])
    # Each node of these was met by one edge first, and each but the leaf has one edge below.
    return sum([each in nodes for each in again]) == len(pairs) - 1

"""Why a leaf's gradient waits until W, or why it can't: in words, for `explain`.

`survey` decides, in explain as in B. The reasons are found by a second, slower walk that only explain uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from zbpp.autograd.capture import saved_by
from zbpp.autograd.graph import Edge, Survey, WeightUse
from zbpp.autograd.hooks import has_node_hooks, num_hooks_made
from zbpp.autograd.node_roles import node_name
from zbpp.autograd.reentrant import is_reentrant
from zbpp.autograd.rules import rule_of
from zbpp.autograd.sharded import is_on_mesh

SiteUse = tuple[Node, WeightUse]


class _LeafUse(NamedTuple):
    """One use of a leaf: the node that computes with it, and the chain of nodes between the two."""

    node: Node | None  # None: the leaf, or a function of the leaf alone, is an output
    operand: int
    through: tuple[Node, ...]  # from the node down to the leaf


class ReversedGraph:
    """The graph that `survey` walked, with each node's users."""

    def __init__(self, roots: list[Edge], stops: frozenset[Edge], found: Survey) -> None:
        self.found = found
        self.leaves = [*[use.leaf for use in found.uses], *found.computed_in_b.values()]
        self.deferred: dict[int, list[SiteUse]] = {}  # id of the leaf -> its uses
        for site, use in zip(found.sites, found.uses, strict=True):
            self.deferred.setdefault(id(use.leaf), []).append((site, use))
        self.sites = set(found.sites)
        self.is_reentrant = any(map(is_reentrant, found.functions))
        self.users: dict[Node, list[tuple[Node | None, int]]] = {}  # node -> (its user, the user's operand)
        pending = [node for node, _ in dict.fromkeys(roots) if node is not None]
        for node in pending:
            self.users.setdefault(node, []).append((None, 0))
        seen = set(pending)
        for node in pending:  # the list grows during the loop
            for operand, edge in enumerate(node.next_functions):
                below = edge[0]
                if below is None or edge in stops:
                    continue
                self.users.setdefault(below, []).append((node, operand))
                if below not in seen:
                    seen.add(below)
                    pending.append(below)

    def uses_of(self, node: Node, through: tuple[Node, ...] = ()) -> Iterator[_LeafUse]:
        """Go up from a leaf, through nodes that each have one edge, to the nodes that compute with it."""
        for user, operand in self.users.get(node, ()):
            if user is None or rule_of(node_name(user)) or _has_several_edges(user):
                yield _LeafUse(user, operand, through)
            else:
                yield from self.uses_of(user, (user, *through))


def _has_several_edges(node: Node) -> bool:
    return sum(below is not None for below, _ in node.next_functions) > 1


def why_deferred(uses: list[SiteUse]) -> str:
    """The sites at which a deferred leaf is used."""
    return _counted(
        _described(site, [node for node, _ in use.chain], computes=use.views is None) for site, use in uses
    )


def why_computed_in_b(graph: ReversedGraph, leaf: Node, tensor: Tensor) -> str:
    """The obstacles at the uses of a leaf that can't wait."""
    if type(tensor) is not nn.Parameter and hasattr(tensor, "__tensor_flatten__") and not is_on_mesh(tensor):
        return f"a {type(tensor).__name__}: subclasses are computed in B"
    uses = list(graph.uses_of(leaf))
    obstacles = [obstacle for use in uses if (obstacle := _obstacle(graph, tensor, use))]
    if not obstacles:
        return "its uses pass through the same nodes, so they can't be told apart: all in B"
    if len(obstacles) < len(uses):
        return f"also {_counted(obstacles)}, so all its uses are in B"
    return _counted(obstacles)


def _counted(texts: Iterable[str]) -> str:
    counts = Counter(texts)
    return "; ".join(f"{text} ({count} uses)" if count > 1 else text for text, count in counts.items())


def _described(node: Node, through: Iterable[Node], *, computes: bool = False) -> str:
    chain = ", ".join(map(node_name, through))
    how = ", which W runs by autograd" if computes else ""
    return f"{node_name(node)} through {chain}{how}" if chain else node_name(node)


def _obstacle(graph: ReversedGraph, tensor: Tensor, use: _LeafUse) -> str | None:
    """Why this use can't wait; None if it could, were it the leaf's only use."""
    operand = use.operand
    node: Any = use.node
    if node is None:
        return "an output itself"
    rule, name = rule_of(node_name(node)), _described(node, use.through)
    if isinstance(node, BackwardCFunction) and rule is None:
        return f"used by the Function {name}, in B unless it calls zbpp.autograd.defer"
    if rule is None:
        return f"used by {name}, which has no rule"
    if operand in rule.along:
        return None if node in graph.sites else f"added in {name}, whose weight does not wait"
    if operand not in rule.weights:
        return f"used by {name} in a place where its rule expects no weight"
    if num_hooks_made() > 0 and has_node_hooks(node):
        return f"used by {name}, a node with hooks of its own"
    if rule.capture(node, operand) is None:
        return f"used by {name}, {_why_declined(node)}"
    if is_on_mesh(tensor) and node not in graph.sites:
        return f"used by {name}, where W can't compute with shards: {_placed(tensor)}"
    return f"used by {name}, which puts off its other operand" if node in graph.sites else None


def _placed(tensor: Any) -> str:
    """The weight's placement on its mesh, then the possible causes."""
    placements = ", ".join(map(str, tensor.placements))
    return (
        f"the weight's placement is {placements} on a mesh of shape {tuple(tensor.device_mesh.shape)}; "
        "its input's does not fit that, or it is used through more than a transpose"
    )


def _why_declined(node: Any) -> str:
    """Why a node's rule returned no Capture."""
    for name in dir(node):
        hook = getattr(getattr(node, name), "unpack_hook", None) if name.startswith("_raw_saved_") else None
        if hook is not None:
            return f"its saved tensors packed by {_origin(hook)}"
    if any(each.layout is not torch.strided for each in saved_by(node)):
        return "one of whose saved tensors is sparse"
    settings = ", ".join(
        f"{name.removeprefix('_saved_')}={getattr(node, name)}"
        for name in ("_saved_alpha", "_saved_beta", "_saved_sparse", "_saved_scale_grad_by_freq")
        if hasattr(node, name)
    )
    return (
        f"which its rule does not split with {settings}" if settings else "which its rule does not split here"
    )


def _origin(hook: Any) -> str:
    """Where a saved-tensor hook comes from: `torch.utils.checkpoint._checkpoint_hook`."""
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{getattr(hook, '__module__', '?')}.{name.partition('.')[0]}"

"""`explain`: which weight gradients B would put off until W, which it would compute itself, and why.

`survey` decides, in explain as in B. The reasons are found by a second, slower walk that only explain uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from zbpp.autograd.arguments import Outputs, as_list, edge_of, needs_grad
from zbpp.autograd.graph import Edge, Survey, WeightUse, survey
from zbpp.autograd.hooks import has_node_hooks, num_hooks_made
from zbpp.autograd.node_roles import node_name
from zbpp.autograd.reentrant import is_reentrant
from zbpp.autograd.rules import rule_of

Names = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Where = Literal["W", "B", "later", "none"]

NOT_COMPILED = "zbpp_not_compiled"
"""The attribute of a parameter that says why the layer of the parameter is not compiled."""


class Leaf(NamedTuple):
    """One trainable leaf. where: in W, in B, as a recompute decides, or nowhere."""

    name: str
    nbytes: int
    where: Where
    why: str


class Explanation(NamedTuple):
    """The rows; `str(explanation)` is the table."""

    rows: tuple[Leaf, ...]

    def __str__(self) -> str:
        head = ("parameter", "KiB", "in", "why")
        rows = [(row.name, f"{row.nbytes / 1024:.1f}", str(row.where), row.why) for row in self.rows]
        cells = [head, *rows]
        names, sizes, places, _ = (max(map(len, column)) for column in zip(*cells, strict=True))
        return "\n".join(
            f"{name:<{names}}  {size:>{sizes}}  {where:<{places}}  {why}" for name, size, where, why in cells
        )


def explain(outputs: Outputs, inputs: Tensor | Iterable[Any] = (), parameters: Names = ()) -> Explanation:
    """What `backward_input(outputs, ..., inputs)` would do with each trainable leaf of the graph.

    Call it after a forward. It runs no node, and frees and keeps nothing. outputs, inputs: as for
    `backward_input`; a gradient is assumed for every output that requires grad. parameters: names for the
    leaves, such as module.named_parameters(). A parameter that the graph doesn't show has a row that says so.
    Raises ValueError if no output requires grad; torch raises RuntimeError if the graph has been used up.
    """
    roots = [edge_of(output) for output in as_list(outputs) if needs_grad(output)]
    if not roots:
        raise ValueError(
            "no output requires grad: there is no graph to explain; run the forward with grad on"
        )
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    stops = frozenset(edge_of(each) for each in given if needs_grad(each))
    names: dict[int, str] = {}
    named = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    for name, tensor in named:
        names[id(tensor)] = f"{names[id(tensor)]} = {name}" if id(tensor) in names else name
    found = survey(roots, stops, None, is_hooked=num_hooks_made() > 0)
    rows: dict[int, Leaf] = {}
    if any(map(is_reentrant, found.functions)):
        told: list[_Told] = [(each, "B", _REENTRANT) for _, each in named]
        found = found._replace(sites=[], uses=[], computed_in_b={}, functions=[])
    else:
        told = [*_in_w(found), *_in_b(found, _users(roots, stops)), *_compiled(found)]
    for tensor, where, why in (*told, *(_not_shown(found, each) for _, each in named)):
        shape = f"[{', '.join(map(str, tensor.shape))}] {str(tensor.dtype).removeprefix('torch.')}"
        reason = getattr(tensor, NOT_COMPILED, None)
        why = f"{why}; not compiled: {reason}" if reason else why
        if tensor.numel() or id(tensor) in names:  # an empty one is the dummy of a checkpoint
            rows.setdefault(id(tensor), Leaf(names.get(id(tensor), shape), tensor.nbytes, where, why))
    order = {key: place for place, key in enumerate(names)}
    return Explanation(tuple(rows[key] for key in sorted(rows, key=lambda key: order.get(key, len(order)))))


_Told = tuple[Tensor, Where, str]
_COMPILED = "zbpp_explained"
_UNCLEAR = (
    "uses that can't be told apart, or beside another weight's; a tensor subclass; shards that don't fit"
)
_REENTRANT = "a reentrant checkpoint is in the graph: everything in B"
_Users = dict[Node, list[tuple[Node | None, int]]]
"""Node -> the nodes that use it, None for an output, and which of their operands it is."""


def _sites(found: Survey) -> Iterator[tuple[Node, WeightUse]]:
    return zip(found.sites, found.uses, strict=True)


def _in_w(found: Survey) -> Iterator[_Told]:
    uses: dict[int, list[tuple[Node, WeightUse]]] = {}
    for site, use in _sites(found):
        uses.setdefault(id(use.leaf), []).append((site, use))
    for each in uses.values():
        why = _counted(_through(site, [node for node, _ in use.chain]) for site, use in each)
        yield each[0][1].leaf, "W", why


def _in_b(found: Survey, users: _Users) -> Iterator[_Told]:
    sites = set(found.sites)
    for leaf, tensor in found.computed_in_b.items():
        all_uses = list(_uses(users, leaf, ()))
        obstacles = [text for use in all_uses if (text := _obstacle(sites, *use))]
        why = _counted(obstacles) or _UNCLEAR
        if obstacles and len(obstacles) < len(all_uses):
            why = f"also {why}, so all its uses are in B"
        yield tensor, "B", why


def _compiled(found: Survey) -> Iterator[_Told]:
    for function in found.functions:
        if hasattr(function, _COMPILED):
            yield from function.zbpp_explained()


def _not_shown(found: Survey, tensor: Tensor) -> _Told:
    if not tensor.requires_grad:
        return tensor, "none", "frozen"
    if any(hasattr(getattr(node, "call", None), "fn") for node in found.functions):
        return tensor, "later", "inside a zbpp.checkpoint, which decides when it is recomputed; or not used"
    return tensor, "none", "not reached"


def _users(roots: Iterable[Edge], stops: frozenset[Edge]) -> _Users:
    """The graph that `survey` walked, reversed."""
    users: _Users = {}
    pending: dict[Node, None] = {}
    for node, _ in roots:
        users.setdefault(node, []).append((None, 0))
        pending[node] = None
    nodes = list(pending)
    for node in nodes:  # the list grows during the loop
        for operand, edge in enumerate(node.next_functions):
            below = edge[0]
            if below is None or edge in stops:
                continue
            if below not in users:
                nodes.append(below)
            users.setdefault(below, []).append((node, operand))
    return users


def _uses(
    users: _Users, node: Node, through: tuple[Node, ...]
) -> Iterator[tuple[Node | None, int, tuple[Node, ...]]]:
    """Go up from a leaf, through nodes that each have one edge, to the nodes that compute with it."""
    for user, operand in users.get(node, ()):
        if (
            user is None
            or rule_of(node_name(user))
            or sum(edge[0] is not None for edge in user.next_functions) > 1
        ):
            yield user, operand, through
        else:
            yield from _uses(users, user, (user, *through))


def _obstacle(sites: set[Node], node: Node | None, operand: int, through: tuple[Node, ...]) -> str:
    """Why this use of a leaf can't wait; "" if it could, were it the leaf's only use."""
    if node is None:
        return "an output itself"
    rule, text = rule_of(node_name(node)), f"used by {_through(node, through)}"
    if rule is None:
        return f"{text}, which has no rule"
    if node in sites:
        return ""
    if operand in rule.along:
        return f"{text}, whose weight does not wait"
    if operand not in rule.weights:
        return f"{text}, where its rule expects no weight"
    if has_node_hooks(node) or rule.capture(node, operand) is None:
        return f"{text}, which has a hook of its own, a factor, or packed or sparse saved tensors"
    return ""


def _through(node: Node, chain: Iterable[Node]) -> str:
    below = ", ".join(map(node_name, chain))
    return f"{node_name(node)} through {below}" if below else node_name(node)


def _counted(texts: Iterable[str]) -> str:
    counts = Counter(texts)
    return "; ".join(f"{text} ({count} uses)" if count > 1 else text for text, count in counts.items())

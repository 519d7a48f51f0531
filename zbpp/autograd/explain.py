"""Which weight gradients B would put off until W, which it would compute itself, and why.

The decision is `survey`'s, the one that B goes by; only the reasons are worked out here, by a
slower walk that nothing else depends on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from zbpp.autograd.graph import Edge, Survey, Use, kind, survey
from zbpp.autograd.hooks import has_node_hooks, num_hooks_made
from zbpp.autograd.referred import referred
from zbpp.autograd.rules import rule_of, saved_by
from zbpp.autograd.split import Outputs, _edge, _listed, _needs_grad

Names = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Where = Literal["W", "B", "later", "none"]

NOT_COMPILED = "zbpp_not_compiled"  # an attribute of a parameter: why its layer stayed eager


class Row(NamedTuple):
    """One trainable leaf. where: its gradient is computed in W, in B, decided later, or not at all.

    x_bytes, dy_bytes: what W holds to compute it; gradient_bytes: a gradient computed in B, which is
    held until W adds it to `.grad`. dy and gradient from their shapes: where they turn out to share
    memory with each other, less is held.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    where: Where
    why: str
    x_bytes: int = 0
    dy_bytes: int = 0
    gradient_bytes: int = 0


class Explanation(NamedTuple):
    """The rows, and the totals of what is held between B and W: each storage counted once.

    `str()` of it is the table.
    """

    rows: tuple[Row, ...]
    x_bytes: int
    dy_bytes: int
    gradient_bytes: int
    compiled_bytes: int  # of compiled layers, of whatever kind

    @property
    def held_bytes(self) -> int:
        """`WeightGrads.held_bytes` to be; less where gradients share memory, more where they are views."""
        return self.x_bytes + self.dy_bytes + self.gradient_bytes + self.compiled_bytes

    def __str__(self) -> str:
        return _table(self)


def explain(
    outputs: Outputs, inputs: Tensor | Iterable[Any] = (), parameters: Names | None = None
) -> Explanation:
    """What `backward_input(outputs, ..., inputs)` would do with each trainable leaf of the graph.

    To be called after a forward; runs no node, frees and keeps nothing. outputs, inputs: as for
    `backward_input`, a gradient being assumed for every output that requires grad. parameters: names
    for the leaves, as (name, tensor) pairs or a mapping, such as module.named_parameters(); those
    that the graph doesn't reach get a row that says so.

    What a checkpoint hides is found where its function is a module, or refers to it by its closure.
    Raises ValueError if no output requires grad, RuntimeError if the graph has been gone through.
    """
    roots = [_edge(output) for output in _listed(outputs) if _needs_grad(output)]
    if not roots:
        raise ValueError(
            "no output requires grad: there is no graph to explain; run the forward with grad on"
        )
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    stops = frozenset(_edge(each) for each in given if _needs_grad(each))
    names = _names(parameters)
    try:
        found = survey(roots, stops, None, is_hooked=num_hooks_made() > 0)
        graph = _Graph(roots, stops, found)
        rows = [*_reached(graph, names), *_compiled(graph, names), *_hidden(graph, names)]
    except RuntimeError as error:
        if "saved tensors after they have been freed" not in str(error) and "second time" not in str(error):
            raise
        raise RuntimeError(
            "this graph has been gone through before: explain it after the forward, before B"
        ) from error
    rows += _others(graph, names, {id(tensor) for tensor, _ in rows})
    order = {key: place for place, key in enumerate(names)}
    rows.sort(key=lambda row: order.get(id(row[0]), len(order)))
    return _total(graph, tuple(row for _, row in rows))


def _names(parameters: Names | None) -> dict[int, tuple[str, Tensor]]:
    """id of a tensor -> its name (a tied one's names joined) and itself."""
    pairs = parameters.items() if isinstance(parameters, Mapping) else parameters or ()
    names: dict[int, tuple[str, Tensor]] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise ValueError(
                f"parameters holds a {type(pair).__name__}, not (name, tensor) pairs: "
                "write module.named_parameters()"
            )
        name, tensor = pair
        before = f"{names[id(tensor)][0]} = " if id(tensor) in names else ""
        names[id(tensor)] = before + name, tensor
    return names


class _Way(NamedTuple):
    """One use of a leaf: the node that computes with it, and the nodes of one edge in between."""

    node: Node | None  # None: the leaf, or a function of it alone, is an output
    operand: int
    through: tuple[Node, ...]  # from the node down to the leaf


class _Graph:
    """What the walk found, with edges turned around."""

    def __init__(self, roots: list[Edge], stops: frozenset[Edge], found: Survey) -> None:
        self.found = found
        self.leaves = [*[use.leaf for use in found.uses], *found.eager.values()]
        self.deferred: dict[int, list[tuple[Node, Use]]] = {}  # by the leaf's id
        for site, use in zip(found.sites, found.uses, strict=True):
            self.deferred.setdefault(id(use.leaf), []).append((site, use))
        self.sites = set(found.sites)
        self.users: dict[Node, list[tuple[Node | None, int]]] = {}
        pending = [node for node, _ in dict.fromkeys(roots) if node is not None]
        for node in pending:
            self.users.setdefault(node, []).append((None, 0))
        seen = set(pending)
        for node in pending:  # which grows meanwhile
            for operand, edge in enumerate(node.next_functions):
                below = edge[0]
                if below is None or edge in stops:
                    continue
                self.users.setdefault(below, []).append((node, operand))
                if below not in seen:
                    seen.add(below)
                    pending.append(below)
        self.is_reentrant = any(kind(node) == "CheckpointFunctionBackward" for node in found.functions)

    def ways(self, node: Node, through: tuple[Node, ...] = ()) -> Iterator[_Way]:
        """Up from a leaf, through nodes of one edge, to what computes with it."""
        for user, operand in self.users.get(node, ()):
            if (
                user is None
                or rule_of(kind(user))
                or len([1 for below, _ in user.next_functions if below]) > 1
            ):
                yield _Way(user, operand, through)
            else:
                yield from self.ways(user, (user, *through))


Found = tuple[Tensor, Row]


def _reached(graph: _Graph, names: dict[int, tuple[str, Tensor]]) -> Iterator[Found]:
    for uses in graph.deferred.values():
        tensor = uses[0][1].leaf
        if graph.is_reentrant:
            yield tensor, _row(tensor, names, "B", _REENTRANT)
            continue
        x = sum(_x_storages(uses).values())
        dy = sum(_dys(uses).values())
        yield tensor, _row(tensor, names, "W", _deferred(uses), x_bytes=x, dy_bytes=dy)
    for leaf, tensor in graph.found.eager.items():
        if not tensor.numel() and id(tensor) not in names:
            continue  # a checkpoint's own dummy
        if graph.is_reentrant:
            yield tensor, _row(tensor, names, "B", _REENTRANT)
        else:
            yield tensor, _row(tensor, names, "B", _eager(graph, leaf, tensor), gradient_bytes=tensor.nbytes)


_REENTRANT = "a reentrant checkpoint is in the graph: everything in B"


def _row(tensor: Tensor, names: dict[int, tuple[str, Tensor]], where: Where, why: str, **held: int) -> Row:
    shape = tuple(tensor.shape)
    unnamed = f"[{', '.join(map(str, shape))}] {str(tensor.dtype).removeprefix('torch.')}"
    name = names[id(tensor)][0] if id(tensor) in names else unnamed
    reason = getattr(tensor, NOT_COMPILED, None)
    return Row(name, shape, tensor.nbytes, where, f"{why}; not compiled: {reason}" if reason else why, **held)


def _x_storages(uses: Iterable[tuple[Node, Use]]) -> dict[int, int]:
    """Bytes of each storage that W keeps, by the storage's identity."""
    uses = list(uses)
    own = {use.leaf.untyped_storage()._cdata for _, use in uses}
    storages = [tensor.untyped_storage() for _, use in uses for tensor in use.tensors()]
    return {each._cdata: each.nbytes() for each in storages if each._cdata not in own}


def _dys(uses: Iterable[tuple[Node, Use]]) -> dict[Node, int]:
    """Bytes of the dy that each site will get: the gradient of its output."""
    return {site: _dy_bytes(site) for site, _ in uses}


def _dy_bytes(site: Any) -> int:
    meta = site._input_metadata[0]
    count = 1
    for size in meta.shape:
        count *= int(size)
    return count * int(meta.dtype.itemsize)


# ---- Why


def _deferred(uses: list[tuple[Node, Use]]) -> str:
    ways = Counter(
        _named(site, [node for node, _ in use.chain], runs=use.views is None) for site, use in uses
    )
    return "; ".join(f"{way} ({count} uses)" if count > 1 else way for way, count in ways.items())


def _named(node: Node, through: Iterable[Node], *, runs: bool = False) -> str:
    chain = ", ".join(map(kind, through))
    how = ", which W runs by autograd" if runs else ""
    return f"{kind(node)} through {chain}{how}" if chain else kind(node)


def _eager(graph: _Graph, leaf: Node, tensor: Tensor) -> str:
    if type(tensor) is not nn.Parameter and hasattr(tensor, "__tensor_flatten__"):
        return f"a {type(tensor).__name__}: subclasses are computed in B"
    ways = list(graph.ways(leaf))
    obstacles = [obstacle for way in ways if (obstacle := _obstacle(graph, way))]
    if not obstacles:
        return "its uses share part of the way, so they can't be told apart: all in B"
    counts = Counter(obstacles)
    first = "; ".join(f"{text} ({count} uses)" if count > 1 else text for text, count in counts.items())
    if len(obstacles) < len(ways):
        return f"also {first}, so all its uses are in B"
    return first


def _obstacle(graph: _Graph, way: _Way) -> str | None:
    """Why this use can't wait; None if by itself it could."""
    operand = way.operand
    node: Any = way.node
    if node is None:
        return "an output itself"
    rule, name = rule_of(kind(node)), _named(node, way.through)
    if isinstance(node, BackwardCFunction) and rule is None:
        return f"used by the Function {name}, in B unless it calls zbpp.autograd.defer"
    if rule is None:
        return f"used by {name}, which has no rule"
    if operand in rule.along:
        return None if node in graph.sites else f"added in {name}, whose weight does not wait"
    if operand not in rule.weights:
        return f"used by {name} as an operand that its rule takes for no weight"
    if num_hooks_made() > 0 and has_node_hooks(node):
        return f"used by {name}, a node with hooks of its own"
    if rule.capture(node, operand) is None:
        return f"used by {name}, {_declined(node)}"
    return f"used by {name}, which puts off its other operand" if node in graph.sites else None


def _declined(node: Any) -> str:
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
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{getattr(hook, '__module__', '?')}.{name.partition('.')[0]}"


# ---- What the graph doesn't show


def _compiled_calls(graph: _Graph) -> list[Any]:
    return [function for function in graph.found.functions if hasattr(function, "zbpp_explained")]


def _compiled(graph: _Graph, names: dict[int, tuple[str, Tensor]]) -> Iterator[Found]:
    for function in _compiled_calls(graph):
        for tensor, where, why in function.zbpp_explained()[1]:
            yield tensor, _row(tensor, names, where, why)


def _hidden(graph: _Graph, names: dict[int, tuple[str, Tensor]]) -> Iterator[Found]:
    """The parameters behind checkpoints, as far as they are found and used nowhere else."""
    known = {id(tensor) for tensor in graph.leaves}
    why = "inside a zbpp.checkpoint: decided when it is recomputed"
    where: Where = "later"
    if graph.is_reentrant:
        why, where = "inside a reentrant checkpoint: everything in B", "B"
    for function in _hiding(graph):
        for tensor in _leaves_of(function):
            if id(tensor) not in known:
                known.add(id(tensor))
                yield tensor, _row(tensor, names, where, why)


def _hiding(graph: _Graph) -> list[Any]:
    """What the checkpoints of this graph will run again."""
    functions = [getattr(getattr(node, "call", None), "fn", None) for node in graph.found.functions]
    functions += [getattr(node, "run_function", None) for node in graph.found.functions]
    return [function for function in functions if function is not None]


def _leaves_of(function: Any) -> Iterator[Tensor]:
    """The trainable leaves that a callable refers to."""
    for thing in referred(function):
        for tensor in thing.parameters() if isinstance(thing, nn.Module) else (thing,):
            if tensor.is_leaf and tensor.requires_grad:
                yield tensor


def _others(graph: _Graph, names: dict[int, tuple[str, Tensor]], known: set[int]) -> list[Found]:
    unless = ", unless inside the checkpoint" if _hiding(graph) else ""
    return [
        (
            tensor,
            _row(tensor, names, "none", f"not reached{unless}" if tensor.requires_grad else "frozen"),
        )
        for _, tensor in names.values()
        if id(tensor) not in known
    ]


# ---- Totals and text


def _total(graph: _Graph, rows: tuple[Row, ...]) -> Explanation:
    uses = [] if graph.is_reentrant else [use for each in graph.deferred.values() for use in each]
    gradients = sum(row.gradient_bytes for row in rows)
    compiled = sum(function.zbpp_explained()[0] for function in _compiled_calls(graph))
    return Explanation(rows, sum(_x_storages(uses).values()), sum(_dys(uses).values()), gradients, compiled)


def _table(explanation: Explanation) -> str:
    head = ("parameter", "size", "in", "x", "dy", "gradient", "why")
    body = [
        (
            row.name,
            _size(row.nbytes),
            row.where,
            *map(_size, (row.x_bytes, row.dy_bytes, row.gradient_bytes)),
            row.why,
        )
        for row in explanation.rows
    ]
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(6)]
    lines = [_line(line, widths) for line in (head, *body)]
    lines += [_count(explanation.rows, where) for where in ("W", "B", "later", "none")]
    kinds = zip(("x", "dy", "gradients", "compiled"), explanation[1:], strict=True)
    held = ", ".join(f"{what} {_size(count)}" for what, count in kinds if count or what != "compiled")
    lines.append(
        f"held between B and W, what is shared counted once: {held}; {_size(explanation.held_bytes)} in all"
    )
    return "\n".join(line for line in lines if line)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    name, size, where, *held = [
        f"{cell:<{width}}" if column in (0, 2) else f"{cell:>{width}}"
        for column, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ]
    return "  ".join((name, size, where, *held, cells[-1])).rstrip()


_WHERE = {
    "W": "computed in W",
    "B": "computed in B",
    "later": "decided in a recompute",
    "none": "no gradient",
}


def _count(rows: tuple[Row, ...], where: str) -> str:
    chosen = [row for row in rows if row.where == where]
    size = _size(sum(row.nbytes for row in chosen))
    return f"{_WHERE[where]}: {len(chosen)} of {len(rows)} parameters, {size}" if chosen else ""


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B" if count else "–"
    value, unit = count / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"

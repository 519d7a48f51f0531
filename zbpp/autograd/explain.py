"""`explain`: which weight gradients B would put off until W, which it would compute itself, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from zbpp.autograd.arguments import Outputs, as_list, edge_of, needs_grad
from zbpp.autograd.deferral_reasons import ReversedGraph, SiteUse, why_computed_in_b, why_deferred
from zbpp.autograd.explanation import Explanation, Row, Where
from zbpp.autograd.forward_state import references
from zbpp.autograd.graph import WeightUse, survey
from zbpp.autograd.hooks import num_hooks_made
from zbpp.autograd.sharded import AddOfShards, bytes_here
from zbpp.autograd.storages import storages_of

Names = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
_NamedTensors = dict[int, tuple[str, Tensor]]
"""id of a tensor -> its name and the tensor."""
_TensorRow = tuple[Tensor, Row]

NOT_COMPILED = "zbpp_not_compiled"
"""The attribute of a parameter that says why the layer of the parameter is not compiled."""


def explain(
    outputs: Outputs, inputs: Tensor | Iterable[Any] = (), parameters: Names | None = None
) -> Explanation:
    """What `backward_input(outputs, ..., inputs)` would do with each trainable leaf of the graph.

    Call it after a forward. It runs no node, and frees and keeps nothing. outputs, inputs: as for
    `backward_input`; a gradient is assumed for every output that requires grad. parameters: names for the
    leaves, as (name, tensor) pairs or a mapping, such as module.named_parameters(). A parameter that the
    graph doesn't reach gets a row that says so.

    Parameters inside a checkpoint are found if the checkpoint's function refers to them, or to their module
    (`references` in forward_state.py says how).
    Raises ValueError if no output requires grad, RuntimeError if an earlier backward has used the graph up.
    """
    roots = [edge_of(output) for output in as_list(outputs) if needs_grad(output)]
    if not roots:
        raise ValueError(
            "no output requires grad: there is no graph to explain; run the forward with grad on"
        )
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    stops = frozenset(edge_of(each) for each in given if needs_grad(each))
    names = _names(parameters)
    try:
        found = survey(roots, stops, None, is_hooked=num_hooks_made() > 0)
        graph = ReversedGraph(roots, stops, found)
        rows = [*_reached(graph, names), *_compiled(graph, names), *_inside_checkpoints(graph, names)]
    except RuntimeError as error:
        if "saved tensors after they have been freed" not in str(error) and "second time" not in str(error):
            raise
        raise RuntimeError(
            "this graph has been gone through before: explain it after the forward, before B"
        ) from error
    rows += _not_reached(graph, names, {id(tensor) for tensor, _ in rows})
    order = {key: place for place, key in enumerate(names)}
    rows.sort(key=lambda row: order.get(id(row[0]), len(order)))
    return _with_totals(graph, tuple(row for _, row in rows))


def _names(parameters: Names | None) -> _NamedTensors:
    """The tensors by id, with their names; the names of a tied tensor are joined."""
    pairs = parameters.items() if isinstance(parameters, Mapping) else parameters or ()
    names: _NamedTensors = {}
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


_REENTRANT = "a reentrant checkpoint is in the graph: everything in B"


def _reached(graph: ReversedGraph, names: _NamedTensors) -> Iterator[_TensorRow]:
    """The leaves that the graph shows."""
    for uses in graph.deferred.values():
        tensor = uses[0][1].leaf
        if graph.is_reentrant:
            yield tensor, _row(tensor, names, "B", _REENTRANT)
            continue
        x = sum(_x_storages(uses).values())
        dy = sum(_dys(uses).values())
        yield tensor, _row(tensor, names, "W", why_deferred(uses), x_bytes=x, dy_bytes=dy)
    for leaf, tensor in graph.found.computed_in_b.items():
        if not tensor.numel() and id(tensor) not in names:
            continue  # the dummy of a checkpoint
        if graph.is_reentrant:
            yield tensor, _row(tensor, names, "B", _REENTRANT)
        else:
            why = why_computed_in_b(graph, leaf, tensor)
            yield tensor, _row(tensor, names, "B", why, gradient_bytes=bytes_here(tensor))


def _row(tensor: Tensor, names: _NamedTensors, where: Where, why: str, **held: int) -> Row:
    shape = tuple(tensor.shape)
    unnamed = f"[{', '.join(map(str, shape))}] {str(tensor.dtype).removeprefix('torch.')}"
    name = names[id(tensor)][0] if id(tensor) in names else unnamed
    reason = getattr(tensor, NOT_COMPILED, None)
    return Row(name, shape, tensor.nbytes, where, f"{why}; not compiled: {reason}" if reason else why, **held)


def _x_storages(uses: Iterable[SiteUse]) -> dict[int, int]:
    """Identity of each storage that W keeps -> its bytes."""
    uses = list(uses)
    own = {storage._cdata for _, use in uses for storage in storages_of(use.leaf)}
    storages = [storage for _, use in uses for tensor in use.tensors() for storage in storages_of(tensor)]
    return {each._cdata: each.nbytes() for each in storages if each._cdata not in own}


def _dys(uses: Iterable[SiteUse]) -> dict[Node, int]:
    """Site -> bytes of its dy, the gradient of the site's output."""
    return {site: _dy_bytes(site, use) for site, use in uses}


def _dy_bytes(site: Any, use: WeightUse) -> int:
    meta = site._input_metadata[0]
    count = 1
    for size in meta.shape:
        count *= int(size)
    leaf: Any = use.leaf
    num_shards = use.add.num_shards(leaf.device_mesh) if isinstance(use.add, AddOfShards) else 1
    return count * int(meta.dtype.itemsize) // num_shards


# ---- Leaves that the graph doesn't show


def _compiled_calls(graph: ReversedGraph) -> list[Any]:
    return [function for function in graph.found.functions if hasattr(function, "zbpp_explained")]


def _compiled(graph: ReversedGraph, names: _NamedTensors) -> Iterator[_TensorRow]:
    """The parameters of compiled modules."""
    for function in _compiled_calls(graph):
        for tensor, where, why in function.zbpp_explained()[1]:
            yield tensor, _row(tensor, names, where, why)


def _inside_checkpoints(graph: ReversedGraph, names: _NamedTensors) -> Iterator[_TensorRow]:
    """The parameters inside checkpoints, if they can be found and are not used elsewhere."""
    known = {id(tensor) for tensor in graph.leaves}
    why = "inside a zbpp.checkpoint: decided when it is recomputed"
    where: Where = "later"
    if graph.is_reentrant:
        why, where = "inside a reentrant checkpoint: everything in B", "B"
    for function in _checkpointed(graph):
        for tensor in _leaves_of(function):
            if id(tensor) not in known:
                known.add(id(tensor))
                yield tensor, _row(tensor, names, where, why)


def _checkpointed(graph: ReversedGraph) -> list[Any]:
    """The functions that the checkpoints of this graph will run again."""
    functions = [getattr(getattr(node, "call", None), "fn", None) for node in graph.found.functions]
    functions += [getattr(node, "run_function", None) for node in graph.found.functions]
    return [function for function in functions if function is not None]


def _leaves_of(function: Any) -> Iterator[Tensor]:
    """The trainable leaves that a callable refers to."""
    for thing in references(function):
        for tensor in thing.parameters() if isinstance(thing, nn.Module) else (thing,):
            if tensor.is_leaf and tensor.requires_grad:
                yield tensor


def _not_reached(graph: ReversedGraph, names: _NamedTensors, known: set[int]) -> list[_TensorRow]:
    """The named parameters that have no row yet."""
    unless = ", unless inside the checkpoint" if _checkpointed(graph) else ""
    return [
        (tensor, _row(tensor, names, "none", f"not reached{unless}" if tensor.requires_grad else "frozen"))
        for _, tensor in names.values()
        if id(tensor) not in known
    ]


def _with_totals(graph: ReversedGraph, rows: tuple[Row, ...]) -> Explanation:
    uses = [] if graph.is_reentrant else [use for each in graph.deferred.values() for use in each]
    gradients = sum(row.gradient_bytes for row in rows)
    compiled = sum(function.zbpp_explained()[0] for function in _compiled_calls(graph))
    return Explanation(rows, sum(_x_storages(uses).values()), sum(_dys(uses).values()), gradients, compiled)

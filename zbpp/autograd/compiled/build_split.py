"""Build a CompiledSplit: compile F, B and W of a call, and plan how values pass between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from zbpp.autograd.compiled.aot_autograd import Joint, Source
from zbpp.autograd.compiled.backward_cut import (
    BackwardCut,
    add_in_place,
    cut_backward,
    is_held,
    separate_convolutions,
)
from zbpp.autograd.compiled.compiled_split import BGraph, CompiledSplit, FGraph, WGraph
from zbpp.autograd.compiled.dynamo import CaptureError
from zbpp.autograd.compiled.fx_graphs import (
    call,
    extract,
    is_random,
    needed_by,
    placeholders,
    results,
    viewed,
)
from zbpp.autograd.compiled.inductor import Backend, build


def build_split(joint: Joint, backend: Backend, sum_dtypes: Mapping[str, torch.dtype]) -> CompiledSplit:
    """Cut the backward graph and compile all three graphs. Raises CaptureError if that can't be done.

    sum_dtypes: for each parameter, the dtype that its gradients are summed in.
    """
    names = _names(joint)
    _refuse_changed(joint, names)
    f = _f_graph(joint, names, backend)
    separate_convolutions(joint.backward)
    gradients = _gradients(joint)
    to_inputs = {source: node for source, node in gradients.items() if isinstance(source, int)}
    to_weights = {source: node for source, node in gradients.items() if isinstance(source, str)}
    free = {node for node in placeholders(joint.backward) if names.b.get(node.name, inf) < len(names.tensors)}
    cut = cut_backward(joint.backward, [*to_inputs.values()], [*to_weights.values()], free)
    values = _described(joint, names)
    w = _w_graph(joint, names, cut, to_inputs, to_weights, len(values), backend, sum_dtypes)
    return CompiledSplit(
        tensors=names.tensors,
        names=(*values, *(f"the gradient that B returned for argument {each}" for each in to_inputs)),
        f=f,
        b=_b_graph(joint, names, cut, tuple(to_inputs), w.tensors, backend),
        w=w,
    )


def _f_graph(joint: Joint, names: _Names, backend: Backend) -> FGraph:
    graph = _forward(joint, names.computed)
    return FGraph(
        run=build(graph, backend),
        inputs=_places(graph, names.f),
        mutated=tuple(map(names.tensors.index, joint.mutated)),
        num_outputs=joint.num_outputs,
        structure=joint.structure,
        kept=tuple(names.f[name] - len(names.tensors) for name in names.arguments),
    )


def _b_graph(
    joint: Joint,
    names: _Names,
    cut: BackwardCut,
    input_gradients: tuple[int, ...],
    w_tensors: tuple[int, ...],
    backend: Backend,
) -> BGraph:
    inputs = _places(cut.b, names.b)
    return BGraph(
        run=build(cut.b, backend),
        inputs=inputs,
        read=tuple(sorted({place for place in (*inputs, *w_tensors) if place < len(names.tensors)})),
        tangents=_tangents(joint),
        input_gradients=input_gradients,
        held=_held_inputs(names, cut),
    )


def _w_graph(
    joint: Joint,
    names: _Names,
    cut: BackwardCut,
    to_inputs: dict[int, Node],
    to_weights: dict[str, Node],
    num_values: int,
    backend: Backend,
    sum_dtypes: Mapping[str, torch.dtype],
) -> WGraph:
    """num_values: the size of B's pool. In CompiledSplit.names, the pool precedes the gradients of B."""
    tensors = tuple(names.b[node.name] for node in placeholders(cut.w)[len(cut.held) :])
    returned = tuple(place for place, node in enumerate(to_inputs.values()) if is_held(node, cut.held))
    by_name = dict(zip(joint.sources, placeholders(joint.forward), strict=True))
    dtypes = tuple(sum_dtypes[name] for name in to_weights)
    add_in_place(cut.w, [by_name[name] for name in to_weights], dtypes)
    number = names.tensors.index
    return WGraph(
        # trusted: guards check the strides of arguments and of the module's tensors, F and B make the other
        # values, and `_in_layout` and `_can_add_to` see to the gradients.
        run=build(cut.w, backend, trusted=True),
        tensors=tensors,
        trained=tuple(map(number, to_weights)),
        sum_dtypes=dtypes,
        computed_in_b=frozenset(number(name) for name, node in to_weights.items() if is_held(node, cut.held)),
        shared=(*_held_inputs(names, cut), *(num_values + place for place in returned), *tensors),
        returned=returned,
    )


def _held_inputs(names: _Names, cut: BackwardCut) -> tuple[int, ...]:
    """Places in B's pool of the held values that are inputs of the backward graph."""
    return tuple(names.b[node.name] for node in cut.held if node.op == "placeholder")


class _Names(NamedTuple):
    """What the placeholders of the forward and the backward graph stand for."""

    tensors: tuple[str, ...]  # names of the module's tensors
    kept: list[str]  # the values of the forward that the backward needs
    arguments: list[str]  # of these, the arguments of the call
    computed: list[str]  # of these, the values that F computes
    f: dict[str, int]  # placeholder of the forward -> its place in F's pool: see compiled_split.py
    b: dict[str, int]  # placeholder of the backward -> its place in B's pool


def _names(joint: Joint) -> _Names:
    needed = [node.name for node in placeholders(joint.backward)]
    wanted = {*_gradients(joint), *joint.mutated}
    # Unused inputs are left out: each call has to look up every tensor that is named here.
    used = [
        (node.name, source)
        for node, source in zip(placeholders(joint.forward), joint.sources, strict=True)
        if node.users or node.name in needed or source in wanted
    ]
    tensors = tuple(dict.fromkeys(source for _, source in used if isinstance(source, str)))
    number = {name: place for place, name in enumerate(tensors)}
    f = {name: number[source] if isinstance(source, str) else len(tensors) + source for name, source in used}
    kept = needed[: len(needed) - len(joint.tangents)]
    arguments = [name for name in kept if f.get(name, -1) >= len(tensors)]
    computed = [name for name in kept if name not in f]
    b = {name: f[name] for name in kept if f.get(name, inf) < len(tensors)}
    behind = [*arguments, *computed, *needed[len(kept) :]]
    b |= {name: place for place, name in enumerate(behind, len(tensors))}
    return _Names(tensors, kept, arguments, computed, f, b)


def _described(joint: Joint, names: _Names) -> list[str]:
    """The values of B's pool, in words."""
    return [
        *names.tensors,
        *(f"argument {names.f[name] - len(names.tensors)} of the stage" for name in names.arguments),
        *("a value that F kept" for _ in names.computed),
        *(f"the gradient that B was given of output {place}" for place in joint.tangents),
    ]


def _gradients(joint: Joint) -> dict[Source, Node]:
    """The gradients that exist, by the tensor or argument that they belong to."""
    if not joint.tangents:  # no output requires grad, and the backward returns nothing
        return {}
    pairs = zip(joint.sources, results(joint.backward), strict=True)
    return {source: node for source, node in pairs if node is not None}


def _tangents(joint: Joint) -> tuple[tuple[int, tuple[int, ...]], ...]:
    ends = placeholders(joint.backward)[-len(joint.tangents) :] if joint.tangents else []
    return tuple(
        (output, tuple(end.meta["val"].stride())) for output, end in zip(joint.tangents, ends, strict=True)
    )


def _forward(joint: Joint, computed: list[str]) -> GraphModule:
    """F's graph. It does not return the inputs that the backward needs: those are kept as they are."""
    nodes = {node.name: node for node in joint.forward.graph.nodes}
    first, last = len(joint.mutated), len(joint.mutated) + joint.num_outputs
    values = results(joint.forward)
    outputs = [*values[:first], *_separate(joint.forward, values[first:last])]
    outputs += [nodes[name] for name in computed]
    used = needed_by(node for node in outputs if isinstance(node, Node))
    if any(is_random(node) and node not in used for node in joint.forward.graph.nodes):
        raise CaptureError("forward draws random numbers that nothing is computed from: leave them out")
    return extract(joint.forward, [node for node in placeholders(joint.forward) if node in used], outputs)


def _separate(graph: GraphModule, outputs: Sequence[Any]) -> list[Any]:
    """The outputs, copied where they share memory with another output, an input or a constant.

    They were copied when the call was traced, but Inductor's passes remove copies. If one tensor were two
    outputs, autograd could not tell which of them requires grad.
    """
    found, owners = [], set[Node]()
    for output in outputs:
        if isinstance(output, Node):
            owner = _owner(output)
            if owner in owners or owner.op != "call_function":
                with graph.graph.inserting_after(output):
                    output = call(graph.graph, torch.ops.aten.clone.default, output)
            owners.add(owner)
        found.append(output)
    return found


def _owner(node: Node) -> Node:
    """The node that made the memory."""
    while (whole := viewed(node)) is not None:
        node = whole
    return node


def _places(graph: GraphModule, pool: dict[str, int]) -> tuple[int, ...]:
    return tuple(pool[node.name] for node in placeholders(graph))


def _refuse_changed(joint: Joint, names: _Names) -> None:
    changed = {names.tensors.index(name): name for name in joint.mutated}
    for name in names.kept:
        if names.f.get(name) in changed:
            raise CaptureError(f"backward needs {changed[names.f[name]]} as it was before forward changed it")

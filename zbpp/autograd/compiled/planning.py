"""From the graphs of a call to its Program: F, B and W, and how values pass between them."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from torch.fx import GraphModule, Node

from zbpp.autograd.compiled.cut import cut, is_held, separate_convolutions
from zbpp.autograd.compiled.dynamo import CaptureError
from zbpp.autograd.compiled.graphs import above, bytes_of, extract, is_random, placeholders, results
from zbpp.autograd.compiled.inductor import Backend, build
from zbpp.autograd.compiled.joint import Joint, Source
from zbpp.autograd.compiled.program import Program
from zbpp.autograd.compiled.totals import add_in_place


def program_of(joint: Joint, backend: Backend) -> Program:
    """Cut the backward and compile all three. Raises CaptureError for what can't be split."""
    names = _names(joint)
    _refuse_changed(joint, names)
    f = _forward(joint, names.computed)
    separate_convolutions(joint.backward)
    gradients = _gradients(joint)
    to_inputs = {source: node for source, node in gradients.items() if isinstance(source, int)}
    to_weights = {source: node for source, node in gradients.items() if isinstance(source, str)}
    free = {node for node in placeholders(joint.backward) if names.b.get(node.name, inf) < len(names.tensors)}
    b, w, held = cut(joint.backward, [*to_inputs.values()], [*to_weights.values()], free)
    w_tensors = tuple(names.b[node.name] for node in placeholders(w)[len(held) :])
    b_inputs = _places(b, names.b)
    kept = tuple(names.b[node.name] for node in held if node.op == "placeholder")
    returned = tuple(place for place, node in enumerate(to_inputs.values()) if is_held(node, held))
    described = _described(joint, names)
    by_name = dict(zip(joint.sources, placeholders(joint.forward), strict=True))
    add_in_place(w, [by_name[name] for name in to_weights])
    number = names.tensors.index
    return Program(
        tensors=names.tensors,
        names=(*described, *(f"the gradient that B returned for argument {each}" for each in to_inputs)),
        trained=tuple(map(number, to_weights)),
        structure=joint.structure,
        num_outputs=joint.num_outputs,
        f=build(f, backend),
        b=build(b, backend),
        w=build(w, backend, trusted=True),  # B gave them, or F took them already
        f_inputs=_places(f, names.f),
        b_inputs=b_inputs,
        w_tensors=w_tensors,
        read=tuple(sorted({place for place in (*b_inputs, *w_tensors) if place < len(names.tensors)})),
        mutated=tuple(map(number, joint.mutated)),
        kept=tuple(names.f[name] - len(names.tensors) for name in names.arguments),
        held=kept,
        tangents=_tangents(joint),
        input_gradients=tuple(to_inputs),
        returned=returned,
        shared=(*kept, *(len(described) + place for place in returned), *w_tensors),
        early=frozenset(number(name) for name, node in to_weights.items() if is_held(node, held)),
        held_bytes=bytes_of(held),
    )


class _Names(NamedTuple):
    """What the placeholders of forward and backward stand for."""

    tensors: tuple[str, ...]  # the module's, by its own names
    kept: list[str]  # what backward needs of forward
    arguments: list[str]  # of that, the call's arguments
    computed: list[str]  # of that, what F returns
    f: dict[str, int]  # a placeholder of forward -> its place: see Program
    b: dict[str, int]


def _names(joint: Joint) -> _Names:
    needed = [node.name for node in placeholders(joint.backward)]
    wanted = {*_gradients(joint), *joint.mutated}
    # The others may go: a call has to find each tensor that is named here.
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
    """The inputs that B may have, in words."""
    return [
        *names.tensors,
        *(f"argument {names.f[name] - len(names.tensors)} of the stage" for name in names.arguments),
        *("what F kept" for _ in names.computed),
        *(f"the gradient that B was given of output {place}" for place in joint.tangents),
    ]


def _gradients(joint: Joint) -> dict[Source, Node]:
    """Those that there are, by what they are of."""
    pairs = zip(joint.sources, results(joint.backward), strict=True)
    return {source: node for source, node in pairs if node is not None}


def _tangents(joint: Joint) -> tuple[tuple[int, tuple[int, ...]], ...]:
    ends = placeholders(joint.backward)[-len(joint.tangents) :] if joint.tangents else []
    return tuple(
        (output, tuple(end.meta["val"].stride())) for output, end in zip(joint.tangents, ends, strict=True)
    )


def _forward(joint: Joint, computed: list[str]) -> GraphModule:
    """F: without what backward takes from its inputs directly."""
    nodes = {node.name: node for node in joint.forward.graph.nodes}
    outputs = results(joint.forward)[: len(joint.mutated) + joint.num_outputs]
    outputs += [nodes[name] for name in computed]
    used = above(node for node in outputs if isinstance(node, Node))
    if any(is_random(node) and node not in used for node in joint.forward.graph.nodes):
        raise CaptureError("forward draws random numbers that nothing is computed from: leave them out")
    return extract(joint.forward, [node for node in placeholders(joint.forward) if node in used], outputs)


def _places(graph: GraphModule, pool: dict[str, int]) -> tuple[int, ...]:
    return tuple(pool[node.name] for node in placeholders(graph))


def _refuse_changed(joint: Joint, names: _Names) -> None:
    changed = {names.tensors.index(name): name for name in joint.mutated}
    for name in names.kept:
        if names.f.get(name) in changed:
            raise CaptureError(f"backward needs {changed[names.f[name]]} as it was before forward changed it")

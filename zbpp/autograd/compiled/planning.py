"""From the graphs of a call to its Program: F, B and W, and how values pass between them."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from zbpp.autograd.compiled.cut import cut, is_held, separate_convolutions
from zbpp.autograd.compiled.graphs import above, bytes_of, extract, placeholders, results
from zbpp.autograd.compiled.inductor import Backend, CaptureError, Joint, build
from zbpp.autograd.compiled.program import Program
from zbpp.autograd.compiled.totals import add_in_place


def program_of(joint: Joint, backend: Backend) -> Program:
    """Cut the backward and compile all three. Raises CaptureError for what can't be split."""
    tensors = tuple(dict.fromkeys(source for source in joint.sources if isinstance(source, str)))
    number = {name: place for place, name in enumerate(tensors)}
    f_pool = {
        node.name: number[source] if isinstance(source, str) else len(tensors) + source
        for node, source in zip(placeholders(joint.forward), joint.sources, strict=True)
    }
    needed = [node.name for node in placeholders(joint.backward)]
    kept = needed[: len(needed) - len(joint.tangents)]
    _refuse_changed(joint, kept, f_pool, number)
    arguments = [name for name in kept if f_pool.get(name, 0) >= len(tensors)]
    computed = [name for name in kept if name not in f_pool]
    f = _forward(joint, computed)

    separate_convolutions(joint.backward)
    behind = [*arguments, *computed, *needed[len(kept) :]]
    b_pool = {name: f_pool[name] for name in kept if f_pool.get(name, len(tensors)) < len(tensors)}
    free = {node for node in placeholders(joint.backward) if node.name in b_pool}
    b_pool |= {name: place for place, name in enumerate(behind, len(tensors))}
    gradients = [(source, node) for source, node in zip(joint.sources, results(joint.backward), strict=True)]
    gradients = [(source, node) for source, node in gradients if node is not None]
    to_inputs = {source: node for source, node in gradients if isinstance(source, int)}
    to_weights = {source: node for source, node in gradients if isinstance(source, str)}
    b, w, held = cut(joint.backward, [*to_inputs.values()], [*to_weights.values()], free)
    passed = [node.name for node in held if node.op == "placeholder"]
    w_tensors = tuple(b_pool[node.name] for node in placeholders(w)[len(held) :])
    by_name = dict(zip(joint.sources, placeholders(joint.forward), strict=True))
    add_in_place(w, [by_name[name] for name in to_weights])
    ends = {node.name: node for node in placeholders(joint.backward)}
    return Program(
        tensors=tensors,
        trained=tuple(number[name] for name in to_weights),
        structure=joint.structure,
        num_outputs=joint.num_outputs,
        f=build(f, backend),
        b=build(b, backend),
        w=build(w, backend, trusted=True),  # B gave them, or F took them already
        f_inputs=_places(f, f_pool),
        b_inputs=_places(b, b_pool),
        w_tensors=w_tensors,
        mutated=tuple(number[name] for name in joint.mutated),
        kept=tuple(f_pool[name] - len(tensors) for name in arguments),
        held=tuple(b_pool[name] for name in passed),
        tangents=tuple(
            (output, tuple(ends[name].meta["val"].stride()))
            for output, name in zip(joint.tangents, needed[len(kept) :], strict=True)
        ),
        input_gradients=tuple(to_inputs),
        early=frozenset(number[name] for name, node in to_weights.items() if is_held(node, held)),
        held_bytes=bytes_of(held),
    )


def _forward(joint: Joint, computed: list[str]) -> GraphModule:
    """F: without what backward takes from its inputs directly."""
    nodes = {node.name: node for node in joint.forward.graph.nodes}
    outputs = results(joint.forward)[: len(joint.mutated) + joint.num_outputs]
    outputs += [nodes[name] for name in computed]
    used = above(node for node in outputs if isinstance(node, Node))
    return extract(joint.forward, [node for node in placeholders(joint.forward) if node in used], outputs)


def _places(graph: GraphModule, pool: dict[str, int]) -> tuple[int, ...]:
    return tuple(pool[node.name] for node in placeholders(graph))


def _refuse_changed(joint: Joint, kept: list[str], pool: dict[str, int], number: dict[str, int]) -> None:
    changed = {number[name]: name for name in joint.mutated}
    for name in kept:
        if pool.get(name) in changed:
            raise CaptureError(f"backward needs {changed[pool[name]]} as it was before forward changed it")

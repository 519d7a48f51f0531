"""The split backward: B gives the gradients of a stage's inputs, W those of its weights, later.

B is ONE ordinary backward pass, with some gradients captured instead of computed:

1. Walk the graph and find the sites whose weight gradients can wait (graph.py).
2. Take from each what W will need, its saved input x, detached (rules.py).
3. Run autograd once, without retaining the graph. Its targets: the inputs; the output edge of each
   site, which captures dy; the other trainable leaves, which are computed here, once. Autograd
   frees every saved tensor as soon as its node has run, and nothing runs twice.
4. W (weight_grads.py): `weight.grad.addmm_(dy.T, x)`; then x and dy are dropped.

So between B and W live the x's and dy's of the deferred sites, and nothing else: the graph and
every other saved tensor are gone. torch's own split (torch.distributed.pipelining) keeps the
whole graph until W.

What W will read is guarded as autograd guards its saved tensors: if an x, a dy or a gradient that B
computed is changed in place before W, W raises an error (weight_grads.py); if Python code in the pass
itself does so, B raises one (arrivals.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from zbpp.autograd.arrivals import Arrivals, after_hooks
from zbpp.autograd.collector import Collector
from zbpp.autograd.graph import Edge, Survey, is_leaf, kind, make, survey, variable
from zbpp.autograd.hooks import multi_grad_hook, num_hooks_made
from zbpp.autograd.weight_grads import Computed, Part, WeightGrads, Work, summed

Outputs = Tensor | GradientEdge | Sequence[Any] | Mapping[Any, Any]
Gradients = Sequence[Tensor | None]
Root = Tensor | GradientEdge


def backward_input(
    outputs: Outputs,
    output_grads: Tensor | Sequence[Tensor | None] | Mapping[Any, Tensor | None] | None,
    inputs: Tensor | Sequence[Any],
    parameters: Iterable[Tensor] | None = None,
) -> tuple[tuple[Tensor | None, ...], WeightGrads]:
    """B: the gradients of `inputs`, and what W needs for those of `parameters`.

    outputs: a tensor, or several in a sequence or mapping; those without grad, and what is no
    tensor, are passed over. An output's GradientEdge stands for it, so that its memory can go before.
    output_grads: likewise one for each, None for an output without grad or that nothing flows into,
    and for a scalar that the backward starts from (then 1). inputs: what the gradients are wanted
    of (anything without grad gets None).
    parameters: leaves; None for every trainable leaf that the graph reaches, inputs excluded. The search for
    leaves stops at each input: with inputs=[x, h], h computed from x, a weight between the two gets nothing.

    Tensor hooks run, on leaves and on what was computed from inputs; of a deferred weight not those on its
    views (`w.t()`), nor hooks of the views' nodes. A parameter used both above and below an input in the
    middle of a graph may get the gradient of both uses, as from torch.autograd.grad.

    Returns (gradients, one per input, None where none flows; WeightGrads). No `.grad` changes
    until `WeightGrads.accumulate()`, and the graph's saved tensors are freed, as by backward().
    A graph that holds a reentrant torch checkpoint, which allows nothing else, takes one plain
    backward here instead: all its `.grad`s are complete before W.
    Raises ValueError for arguments that don't fit, before anything runs, and RuntimeError for a graph
    that has been gone through before, or if a Function's backward or a hook changes a gradient in place
    that W needs.
    """
    roots, root_grads = _roots(outputs, output_grads)
    inputs = tuple(_listed(inputs))
    grads, work = split(roots, root_grads, inputs, _wanted(parameters), is_hooked=num_hooks_made() > 0)
    return grads, WeightGrads(work)


def split(
    roots: Sequence[Root],
    root_grads: list[Tensor],
    inputs: tuple[Any, ...],
    wanted: set[int] | None,
    *,
    is_hooked: bool,
) -> tuple[tuple[Tensor | None, ...], list[Work]]:
    """`backward_input` after its checks; wanted: ids of the parameters.

    is_hooked: whether a tensor that was computed, or a node, may have hooks. To look after them takes time.
    """
    edges = {i: _edge(each) for i, each in enumerate(inputs) if _needs_grad(each)}
    try:
        stops = frozenset(edges.values())
        found = survey([_edge(root) for root in roots], stops, wanted, is_hooked=is_hooked)
    except RuntimeError as error:
        raise _second_pass(error) from error
    if found.functions and "CheckpointFunctionBackward" in map(kind, found.functions):
        _refuse_a_part(edges, wanted)
        return _whole_backward(roots, root_grads, inputs, edges), []
    collector = Collector(inputs, wanted, is_hooked) if found.functions else None
    arrived = iter(_captured(roots, root_grads, [*edges.values()], found, collector, is_hooked))
    grads: list[Tensor | None] = [None] * len(inputs)
    for position in edges:
        grads[position] = next(arrived)
    work = _work(found, arrived)
    return (tuple(grads), work) if collector is None else collector.added_to(grads, work)


def _captured(
    roots: Sequence[Root],
    root_grads: list[Tensor],
    edges: list[Edge],
    found: Survey,
    collector: Collector | None,
    is_hooked: bool,
) -> Gradients:
    """The pass: gradients of the inputs' edges, the sites, and the leaves that can't wait, in this order."""
    targets = [make(GradientEdge, (*edge, None)) for edge in edges]
    targets += [make(GradientEdge, (site, 0, None)) for site in found.sites]
    hooked = after_hooks(targets, len(edges)) if is_hooked else {}
    targets += [make(GradientEdge, (leaf, 0, None)) for leaf in found.eager]
    for function in found.functions:
        function.zbpp_collector = collector
    # Only these run Python code in the pass, which may change what has arrived.
    arrivals = Arrivals(found.sites, found.eager.values()) if found.functions or is_hooked else None
    try:
        captured = _run(roots, root_grads, targets)
    finally:
        for function in found.functions:
            del function.zbpp_collector
        changed = arrivals.end() if arrivals else []
    _refuse_changed(changed, found.functions)
    if hooked:
        captured = [hooked.get(position, (grad,))[0] for position, grad in enumerate(captured)]
        hooked.clear()  # the sites' hooks refer to it
    return captured


def _refuse_changed(changed: list[Tensor], functions: list[Any]) -> None:
    """A gradient that W needs was changed in place after it had arrived."""
    if changed:
        names = sorted({kind(function).removesuffix("Backward") for function in functions})
        by = f"the backward of {' or '.join(names)}, or a hook," if names else "a hook"
        raise RuntimeError(
            f"{by} changes in place a gradient of shape {tuple(changed[0].shape)} that another layer was "
            "given, too, whose weight gradient W is to compute from it: return a new tensor (grad * 0.1, "
            "not grad.mul_(0.1))"
        )


def _work(found: Survey, arrived: Iterator[Tensor | None]) -> list[Work]:
    """What W has to do. A node that no gradient reached adds nothing, as in plain autograd."""
    parts = [
        make(Part, (use, dy, use.version + dy._version))
        for use, dy in zip(found.uses, arrived, strict=False)
        if dy is not None
    ]
    work: list[Work] = summed(parts) if found.has_sums else parts
    for leaf, gradient in zip(found.eager.values(), arrived, strict=True):
        if gradient is not None:
            work.append(make(Computed, (leaf, gradient, gradient._version)))
    return work


def _run(roots: Sequence[Root], root_grads: list[Tensor], targets: list[GradientEdge]) -> Gradients:
    """torch.autograd.grad(roots, targets, root_grads, allow_unused=True) without its checks, done above.

    They would cost as much as ten linear layers' worth of B, and import sympy.
    """
    if not targets:
        return ()
    engine = torch.autograd.Variable._execution_engine
    try:
        captured: Gradients = engine.run_backward(
            tuple(roots),
            tuple(root_grads),
            False,  # keep_graph
            False,  # create_graph
            tuple(targets),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    except RuntimeError as error:
        raise _second_pass(error) from error
    return captured


def _second_pass(error: RuntimeError) -> Exception:
    """Torch's word on a freed graph, in ours; any other error as it is."""
    if "backward through the graph a second time" not in str(error):
        return multi_grad_hook(error)
    return RuntimeError(
        "this graph has been gone through before, and B keeps nothing of it: run the forward again; pass "
        "all outputs and their gradients to one backward_input; pass to zbpp.checkpoint as an argument what "
        "its function closes over and was computed outside"
    )


def _refuse_a_part(edges: dict[int, Edge], wanted: set[int] | None) -> None:
    """A plain backward stops at leaves only, and adds to the `.grad` of all."""
    asked = [f"inputs[{i}] was computed from others" for i, (node, _) in edges.items() if _is_computed(node)]
    if wanted is not None:
        asked.append("parameters are named")
    if asked:
        raise ValueError(
            f"{asked[0]}, but the graph holds a reentrant checkpoint, which allows only a backward of the "
            "whole graph: checkpoint with use_reentrant=False or zbpp.checkpoint, or pass detached leaves as "
            "inputs and parameters=None"
        )


def _is_computed(node: Node) -> bool:
    """Whether a backward that goes on from here does harm: not if it is one step from an untrained leaf."""
    return not is_leaf(node) and any(
        below is not None and not (is_leaf(below) and type(variable(below)) is Tensor)
        for below, _ in node.next_functions
    )


def _whole_backward(
    roots: Sequence[Root], root_grads: list[Tensor], inputs: tuple[Any, ...], edges: dict[int, Edge]
) -> tuple[Tensor | None, ...]:
    """One plain backward; the inputs' gradients are taken on the way, their `.grad` stays as it was."""
    caught: dict[int, Tensor] = {}

    def catch(position: int, output: int, grads: tuple[Tensor, ...]) -> None:
        caught[position] = grads[output]

    handles = [
        node.register_prehook(partial(catch, position, output)) for position, (node, output) in edges.items()
    ]
    leaves = [each for each in inputs if isinstance(each, Tensor) and each.is_leaf]
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(roots, root_grads)  # type: ignore[arg-type]  # a mixture is fine
    for leaf, grad in zip(leaves, before, strict=True):
        leaf.grad = grad
    for handle in handles:
        handle.remove()
    return tuple(caught.get(position) for position in range(len(inputs)))


def _roots(outputs: Outputs, output_grads: Any) -> tuple[list[Root], list[Tensor]]:
    """The outputs that gradients start from, each with its gradient."""
    values = _listed(outputs)
    grads = [None] * len(values) if output_grads is None else _listed(output_grads)
    if len(grads) != len(values):
        raise ValueError(f"{len(values)} outputs but {len(grads)} output_grads: give one for each, or None")
    roots: list[Root] = []
    root_grads: list[Tensor] = []
    for position, output in enumerate(values):
        grad = grads[position]
        if not _needs_grad(output):
            if grad is not None:
                raise ValueError(f"output {position} does not require grad: its gradient must be None")
        elif grad is not None:
            if not _fits(output, grad):
                raise _misfit(position, output, grad)
            roots.append(output)
            # Autograd does not count the changes of tensors made in inference mode.
            root_grads.append(grad.clone() if grad.is_inference() else grad)
        elif isinstance(output, Tensor) and output.numel() == 1:
            roots.append(output)
            root_grads.append(torch.ones_like(output))
        elif output_grads is None:
            raise ValueError(f"output {position} is no scalar: give its gradient in output_grads")
    if not roots:
        raise ValueError(
            "no output that requires grad has a gradient: there is nothing to go backward through"
        )
    return roots, root_grads


def _needs_grad(value: Any) -> bool:
    return value.requires_grad if isinstance(value, Tensor) else isinstance(value, GradientEdge)


def _fits(output: Root, grad: Any) -> bool:
    if not isinstance(grad, Tensor):
        return False
    if isinstance(output, Tensor):
        return output.shape == grad.shape and output.device == grad.device
    meta = _meta(output)
    return [*grad.shape] == meta.shape and grad.device == meta.device


def _meta(output: Root) -> Any:
    """What has its shape and device."""
    return output if isinstance(output, Tensor) else output.node._input_metadata[output.output_nr]


def _misfit(position: int, output: Root, grad: Any) -> ValueError:
    if not isinstance(grad, Tensor):
        return ValueError(f"the gradient of output {position} is a {type(grad).__name__}, not a tensor")
    meta = _meta(output)
    return ValueError(
        f"the gradient of output {position} is {tuple(grad.shape)} on {grad.device}, "
        f"the output {tuple(meta.shape)} on {meta.device}: they must match"
    )


def _listed(values: Any) -> list[Any]:
    if isinstance(values, (Tensor, GradientEdge)):  # a union of types is slow to make
        return [values]
    if isinstance(values, (list, tuple)):
        return list(values)
    return list(values.values() if isinstance(values, Mapping) else values)


def _wanted(parameters: Iterable[Tensor] | None) -> set[int] | None:
    if parameters is None:
        return None
    chosen = list(parameters)
    for position, tensor in enumerate(chosen):
        if not tensor.is_leaf:
            raise ValueError(
                f"parameters[{position}] of shape {tuple(tensor.shape)} is not a leaf: it was computed from "
                "others; name those, or pass parameters=None"
            )
    return {id(tensor) for tensor in chosen}


def _edge(tensor: Root) -> Edge:
    if isinstance(tensor, GradientEdge):
        return tensor[:2]
    node = tensor.grad_fn
    if node is not None:
        return node, tensor.output_nr
    with torch.set_grad_enabled(True):  # a leaf has no node of its own: ask a view
        edge: Edge = tensor.view_as(tensor).grad_fn.next_functions[0]  # type: ignore[union-attr, assignment]
    return edge

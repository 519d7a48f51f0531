"""The split backward: B computes the gradients of a stage's inputs, W those of its weights, later.

How B and W are split. B is ONE ordinary backward pass, in which some gradients are captured instead of used:

1. Walk the graph and find the SITES, nodes whose weight gradient can wait, such as linear layers (graph.py).
2. Take from each site the tensors that W will need, its saved input x above all, detached (rules.py).
3. Run autograd once, without retaining the graph. The targets of this pass are the inputs; the output of each
   site, where the pass captures its gradient dy but computes no weight gradient from it; and all other
   trainable leaves, whose gradients are computed here.
4. W computes `weight.grad.addmm_(dy.T, x)` for each site, then drops x and dy (weight_grads.py).

What lives between B and W. WeightGrads holds the x and dy of each site, the gradients that B computed for the
other leaves, what Functions put off with `defer` (collector.py), and what compiled calls put off (they choose
what they hold: compiled/__init__.py). Nothing else is kept, because autograd frees every saved tensor as soon
as its node has run, no node runs twice, and nothing that WeightGrads holds refers to the graph (but for the
few nodes of a weight's own chain, see graph.py). torch's own split (torch.distributed.pipelining) keeps the
whole graph until W.

Several passes. With keep=True the pass retains the graph, so that another B can follow. The tasks of each
pass hold x (shared with the graph, no copy) and a dy of their own.

Who notices a change in place. Autograd checks that its saved tensors are unchanged; the split checks the
same of all that W reads. If Python code changes a gradient while B's pass runs, B raises ChangedInPlace
(gradient_guard.py); if an x, a dy or a gradient changes between B and W, W raises it (weight_grads.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zbpp.autograd.arguments import Outputs, Root, as_list, edge_of, leaf_ids, needs_grad, roots_and_grads
from zbpp.autograd.chains import share_chains
from zbpp.autograd.collector import Collector, collector_of
from zbpp.autograd.gradient_guard import GradientGuard
from zbpp.autograd.graph import Edge, Survey, new_tuple, survey
from zbpp.autograd.hooked_leaves import grouped
from zbpp.autograd.hooks import num_hooks_made, without_hooks
from zbpp.autograd.leaf_grad import added_at_once
from zbpp.autograd.node_roles import changes_no_gradient, node_name
from zbpp.autograd.reentrant import is_reentrant, whole_backward
from zbpp.autograd.weight_grads import (
    ChangedInPlace,
    ComputedTask,
    Task,
    UseTask,
    WeightGrads,
    tasks_per_leaf,
)

Gradients = Sequence[Tensor | None]


def backward_input(
    outputs: Outputs,
    output_grads: Tensor | Sequence[Tensor | None] | Mapping[Any, Tensor | None] | None,
    inputs: Tensor | Sequence[Any],
    parameters: Iterable[Tensor] | None = None,
    *,
    keep: bool = False,
) -> tuple[tuple[Tensor | None, ...], WeightGrads]:
    """B: the gradients of `inputs`, and a WeightGrads from which W computes those of `parameters`.

    outputs: a tensor, or a sequence or mapping of several. Outputs without grad and outputs that are no
    tensors are passed over. The GradientEdge of an output may stand for it, so that the output's memory can
    be freed before B.
    output_grads: one gradient per output, in the same form. None for an output without grad, for one that
    no gradient flows into, and for a scalar that the backward starts from (its gradient is then 1).
    inputs: the tensors whose gradients are wanted; one without grad gets None.
    parameters: leaves. None stands for every trainable leaf that the graph reaches, inputs excluded. The walk
    stops at each input: with inputs=[x, h], h computed from x, a weight between x and h gets no gradient.
    keep: leave the graph and its saved tensors for another backward_input, as retain_graph=True does. Each
    pass has a WeightGrads of its own; their W's may run in any order, before or after later passes. The last
    pass, without keep, frees the saved tensors. Without a last pass the graph lives as long as the outputs.

    Hooks run: those of leaves in W, the others in B. Two kinds don't run: hooks on views of a deferred weight
    (`w.t()`), and hooks on the nodes of such views. If an input lies in the middle of a graph, a parameter
    that is used both before and after that input may get the gradient of both uses, as from
    torch.autograd.grad.

    Returns (gradients, one per input, None where none flows; WeightGrads). No `.grad` changes until
    `WeightGrads.accumulate()`. Without keep the graph's saved tensors are freed, as by backward(). A graph
    that holds a reentrant checkpoint takes one plain backward instead: then the gradients of all leaves
    without hooks are complete before W.

    Raises ValueError for arguments that don't fit, before anything runs; RuntimeError for a graph that an
    earlier backward has gone through; ChangedInPlace, a RuntimeError, if a Function's backward or a hook
    changes a gradient in place that W needs.
    """
    roots, root_grads = roots_and_grads(outputs, output_grads)
    inputs = tuple(as_list(inputs))
    wanted = leaf_ids(parameters)
    grads, tasks, _ = split(roots, root_grads, inputs, wanted, is_hooked=num_hooks_made() > 0, keep=keep)
    return grads, WeightGrads(tasks)


def split(
    roots: Sequence[Root],
    root_grads: list[Tensor],
    inputs: tuple[Any, ...],
    wanted: set[int] | None,
    *,
    is_hooked: bool,
    keep: bool = False,
    at_once: bool = False,
) -> tuple[tuple[Tensor | None, ...], list[Task], list[Tensor]]:
    """`backward_input` after its checks. Returns the inputs' gradients, the tasks of W, and large gradients.

    The large gradients are those that the tasks of a language model's head hold (`Collector.large`): a caller
    may run these tasks at once, see WeightGrads.is_large.
    wanted: ids of the parameters, None for all. is_hooked: whether computed tensors or nodes may have hooks;
    looking for hooks takes time. keep: as in backward_input. at_once: whether W follows B at once (BW). If no
    leaf has hooks, the pass then adds gradients to `.grad`: those that Functions put off, and those that B
    computes, these not beside a zbpp.checkpoint or a compiled call. Their memory is free before the pass is
    over.
    """
    edges = {position: edge_of(each) for position, each in enumerate(inputs) if needs_grad(each)}
    try:
        stops = frozenset(edges.values())
        found = survey([edge_of(root) for root in roots], stops, wanted, is_hooked=is_hooked)
    except RuntimeError as error:
        raise _in_our_words(error) from error
    if found.functions and any(map(is_reentrant, found.functions)):
        return *whole_backward(roots, root_grads, inputs, edges, wanted, found, keep=keep), []
    if keep:
        share_chains(found.uses)
    at_once = at_once and not found.hooked
    collector = Collector(inputs, wanted, is_hooked, keep, at_once) if found.functions else None
    # W runs the hooks of leaves: B captures the gradients that come before them.
    hooked = [node for node in found.hooked.values() if node in found.computed_in_b]
    added = _added_in_pass(found, wanted) if at_once else []
    with (
        without_hooks(hooked) if hooked else nullcontext(),
        added_at_once(added) if added else nullcontext(),
    ):
        captured = iter(_captured(roots, root_grads, [*edges.values()], found, collector, is_hooked, keep))
    grads: list[Tensor | None] = [None] * len(inputs)
    for position in edges:
        grads[position] = next(captured)
    tasks = _tasks(found, captured, wanted, is_added=bool(added))
    if collector is not None:
        grads, tasks = collector.added_to(grads, tasks)
    if found.hooked or collector is not None:
        asked = {key: node for key, node in found.hooked.items() if wanted is None or key in wanted}
        tasks = grouped(tasks, asked)
    return tuple(grads), tasks, [] if collector is None else collector.large


def _captured(
    roots: Sequence[Root],
    root_grads: list[Tensor],
    edges: list[Edge],
    found: Survey,
    collector: Collector | None,
    is_hooked: bool,
    keep: bool,
) -> Gradients:
    """Run the pass. Returns the inputs' gradients, then each site's dy, then the other leaves' gradients."""
    targets = [new_tuple(GradientEdge, (*edge, None)) for edge in edges]
    targets += [new_tuple(GradientEdge, (site, 0, None)) for site in found.sites]
    targets += [new_tuple(GradientEdge, (leaf, 0, None)) for leaf in found.computed_in_b]
    # The pass inside a checkpoint may reach Functions of the enclosing pass. Afterwards these get back the
    # collector of the enclosing pass.
    outer = [collector_of(function) for function in found.functions]
    for function in found.functions:
        function.zbpp_collector = collector
    # Functions and hooks are the only Python code in the pass: nothing else can change a captured gradient.
    may_change = is_hooked or not all(map(changes_no_gradient, found.functions))
    guard = GradientGuard(found.sites, found.computed_in_b.values()) if may_change else None
    try:
        captured = _run(roots, root_grads, targets, keep)
    finally:
        for function, before in zip(found.functions, outer, strict=True):
            function.zbpp_collector = before
        changed = guard.end() if guard else []
    _refuse_changed(changed, found.functions)
    if found.functions:
        _refuse_added(found)
    if guard:
        captured = [guard.dys.get(number, grad) for number, grad in enumerate(captured, -len(edges))]
    return captured


def _refuse_changed(changed: list[Tensor], functions: list[Any]) -> None:
    """Raise ChangedInPlace if the guard found gradients that changed after they were captured."""
    if changed:
        names = sorted({node_name(function).removesuffix("Backward") for function in functions})
        by = f"the backward of {' or '.join(names)}, or a hook," if names else "a hook"
        raise ChangedInPlace(
            f"{by} changes a gradient of shape {tuple(changed[0].shape)} in place. Another layer got the "
            "same tensor, and W needs it unchanged: return a new tensor (grad * 0.1, not grad.mul_(0.1))"
        )


def _refuse_added(found: Survey) -> None:
    """Raise RuntimeError if a Function's backward has added to a weight's `main_grad` itself.

    Such a backward (Transformer Engine's, Megatron's) says so in an attribute of the weight, and returns a
    gradient without meaning.
    """
    added = [each for each in found.computed_in_b.values() if getattr(each, "grad_added_to_main_grad", False)]
    if added:
        names = sorted({node_name(function).removesuffix("Backward") for function in found.functions})
        raise RuntimeError(
            f"the backward of {' or '.join(names)} has added the gradient of a weight of shape "
            f"{tuple(added[0].shape)} to its main_grad (grad_added_to_main_grad), but W adds to main_grad: "
            "write fuse_wgrad_accumulation=False (Transformer Engine) or gradient_accumulation_fusion=False "
            "(Megatron)"
        )


def _added_in_pass(found: Survey, wanted: set[int] | None) -> list[Tensor]:
    """The leaves to whose `.grad` a BW adds in its pass; [] if there is a checkpoint or a compiled call.

    An empty leaf shows such a call: it is the call's dummy input. The call may defer one gradient of a leaf
    while the pass computes another gradient of the same leaf. W then adds both, so that the order of the sum
    does not depend on which comes first.
    """
    leaves = found.computed_in_b.values()
    if found.functions and not all(each.numel() for each in leaves):
        return []
    return [each for each in leaves if wanted is None or id(each) in wanted]


def _tasks(
    found: Survey, captured: Iterator[Tensor | None], wanted: set[int] | None, *, is_added: bool
) -> list[Task]:
    """The tasks of W. As in plain autograd, a node that no gradient reached adds nothing.

    is_added: whether the pass has added the gradients that B computes.
    """
    uses = [
        new_tuple(UseTask, (use, dy, use.version + dy._version))
        for use, dy in zip(found.uses, captured, strict=False)
        if dy is not None
    ]
    tasks: list[Task] = tasks_per_leaf(uses) if found.has_sums else uses
    for leaf, gradient in zip(found.computed_in_b.values(), captured, strict=True):
        if gradient is not None and not is_added and (wanted is None or id(leaf) in wanted):
            tasks.append(new_tuple(ComputedTask, (leaf, gradient, gradient._version)))
    return tasks


def _run(
    roots: Sequence[Root], root_grads: list[Tensor], targets: list[GradientEdge], keep: bool
) -> Gradients:
    """torch.autograd.grad(roots, targets, root_grads, keep, allow_unused=True) without its checks.

    The checks have been made before, or are needless (StageWorker). Here they would cost as much as B of ten
    linear layers, and import sympy.
    """
    if not targets:
        return ()
    engine = torch.autograd.Variable._execution_engine
    try:
        captured: Gradients = engine.run_backward(
            tuple(roots),
            tuple(root_grads),
            keep,  # keep_graph
            False,  # create_graph
            tuple(targets),
            allow_unreachable=True,
            accumulate_grad=False,
        )
    except RuntimeError as error:
        raise _in_our_words(error) from error
    return captured


def _in_our_words(error: RuntimeError) -> Exception:
    """The error itself, or one with our own text for a freed graph or a hook that B can't serve."""
    if "backward through the graph a second time" not in str(error):
        return error
    return RuntimeError(
        "this graph has been gone through before, and B keeps nothing of it. One of these helps: run the "
        "forward again; give all outputs and their gradients to one backward_input; write "
        "backward_input(..., keep=True) in every pass but the last; if the function of a "
        "zbpp.checkpoint uses a tensor that was computed outside, pass that tensor as an argument"
    )

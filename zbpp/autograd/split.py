"""The split backward: B gives the gradients of a stage's inputs, W those of its weights, later.

B is ONE ordinary backward pass, with some gradients captured instead of computed:

1. Walk the graph and find the sites whose weight gradients can wait (graph.py).
2. Take from each what W will need, its saved input x, detached (rules.py).
3. torch.autograd.grad with retain_graph=False. Its targets: the inputs; the output edge of each
   site, which captures dy; the other trainable leaves, which are computed here, once. Autograd
   frees every saved tensor as soon as its node has run, and nothing runs twice.
4. W (weight_grads.py): `weight.grad.addmm_(dy.T, x)`; then x and dy are dropped.

So between B and W live the x's and dy's of the deferred sites, and nothing else: the graph and
every other saved tensor are gone. torch's own split (torch.distributed.pipelining) keeps the
whole graph until W.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from zbpp.autograd.graph import Edge, Survey, survey, variable
from zbpp.autograd.weight_grads import Computed, Deferred, Part, WeightGrads

Tensors = Tensor | Sequence[Tensor]


def backward_input(
    outputs: Tensors,
    output_grads: Tensor | Sequence[Tensor | None] | None,
    inputs: Tensors,
    parameters: Iterable[Tensor] | None = None,
) -> tuple[tuple[Tensor | None, ...], WeightGrads]:
    """B: the gradients of `inputs`, and what W needs for those of `parameters`.

    outputs: tensors; those without grad are allowed. output_grads: one per output, None for
    an output without grad or for a scalar (then 1). inputs: not leaves that should get a `.grad`;
    the pass stops at them. parameters: leaves; None for every trainable leaf that the graph
    reaches, inputs excluded.

    Returns (gradients, one per input, None where none flows; WeightGrads). No `.grad` changes
    until `WeightGrads.accumulate()`. The graph's saved tensors are freed, as by backward().
    Raises ValueError for arguments that don't fit, before anything runs.
    """
    inputs = _as_tuple(inputs)
    roots, root_grads = _roots(_as_tuple(outputs), output_grads)
    stops = {_edge(tensor) for tensor in inputs if tensor.requires_grad}
    found = survey([_edge(tensor) for tensor in roots], stops, _wanted(parameters))
    return _capture(roots, root_grads, inputs, found)


def _capture(
    roots: list[Tensor], root_grads: list[Tensor | None], inputs: tuple[Tensor, ...], found: Survey
) -> tuple[tuple[Tensor | None, ...], WeightGrads]:
    sites = list(dict.fromkeys(use.site for uses in found.deferred.values() for use in uses))
    required = [tensor for tensor in inputs if tensor.requires_grad]
    targets = [
        *map(get_gradient_edge, required),
        *(GradientEdge(site, 0) for site in sites),
        *(GradientEdge(leaf, 0) for leaf in found.eager),
    ]
    captured = iter(torch.autograd.grad(roots, targets, root_grads, allow_unused=True) if targets else ())
    grads = tuple(next(captured) if tensor.requires_grad else None for tensor in inputs)
    dys = {site: next(captured) for site in sites}
    eager = list(zip(found.eager, captured, strict=True))
    return grads, WeightGrads(_deferred(found, dys) + _computed(eager))


def _deferred(found: Survey, dys: Mapping[Node, Tensor | None]) -> list[Deferred | Computed]:
    work: list[Deferred | Computed] = []
    for leaf, uses in found.deferred.items():
        # A site that no gradient reached adds nothing, as in plain autograd.
        parts = [Part(use.capture, use.chain, dy) for use in uses for dy in [dys[use.site]] if dy is not None]
        if parts:
            work.append(Deferred(variable(leaf), parts))
    return work


def _computed(eager: Sequence[tuple[Node, Tensor | None]]) -> list[Deferred | Computed]:
    return [Computed(variable(leaf), gradient) for leaf, gradient in eager if gradient is not None]


def _roots(
    outputs: tuple[Tensor, ...], output_grads: Tensor | Sequence[Tensor | None] | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs that require grad, each with the gradient it starts from."""
    if output_grads is None:
        output_grads = (None,) * len(outputs)
    grads = (output_grads,) if isinstance(output_grads, Tensor) else tuple(output_grads)
    if len(grads) != len(outputs):
        raise ValueError(f"{len(outputs)} outputs but {len(grads)} output_grads: give one for each, or None")
    for position, (output, grad) in enumerate(zip(outputs, grads, strict=True)):
        _check_root(position, output, grad)
    chosen = [position for position, output in enumerate(outputs) if output.requires_grad]
    if not chosen:
        raise ValueError("no output requires grad: there is nothing to go backward through")
    return [outputs[i] for i in chosen], [grads[i] for i in chosen]


def _check_root(position: int, output: Tensor, grad: Tensor | None) -> None:
    name = f"outputs[{position}]"
    if not output.requires_grad:
        if grad is not None:
            raise ValueError(f"{name} does not require grad: its entry in output_grads must be None")
    elif grad is None:
        if output.numel() != 1:
            raise ValueError(
                f"{name} has shape {tuple(output.shape)}: only a scalar can go without a gradient"
            )
    elif grad.shape != output.shape or grad.device != output.device:
        raise ValueError(
            f"output_grads[{position}] is {tuple(grad.shape)} on {grad.device}, "
            f"{name} is {tuple(output.shape)} on {output.device}: they must match"
        )


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


def _edge(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _as_tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)

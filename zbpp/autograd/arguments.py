"""The arguments of `backward_input` and `explain`: checked, and brought into one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from zbpp.autograd.graph import Edge

Outputs = Tensor | GradientEdge | Sequence[Any] | Mapping[Any, Any]
Root = Tensor | GradientEdge
"""An output that a backward pass starts from."""


def roots_and_grads(outputs: Outputs, output_grads: Any) -> tuple[list[Root], list[Tensor]]:
    """The outputs that the pass starts from, and the gradient of each of them.

    Raises ValueError if outputs and gradients don't fit each other.
    """
    values = as_list(outputs)
    grads = [None] * len(values) if output_grads is None else as_list(output_grads)
    if len(grads) != len(values):
        raise ValueError(f"{len(values)} outputs but {len(grads)} output_grads: give one for each, or None")
    roots: list[Root] = []
    root_grads: list[Tensor] = []
    for position, output in enumerate(values):
        grad = grads[position]
        if not needs_grad(output):
            if grad is not None:
                raise ValueError(f"output {position} does not require grad: its gradient must be None")
        elif grad is not None:
            if not _fits(output, grad):
                raise _misfit(position, output, grad)
            roots.append(output)
            # Autograd does not count in-place changes of tensors that were made in inference mode.
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


def leaf_ids(parameters: Iterable[Tensor] | None) -> set[int] | None:
    """The ids of the parameters; None stands for all. Raises ValueError for a tensor that is no leaf."""
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


def as_list(values: Any) -> list[Any]:
    """One value, a sequence or the values of a mapping, as a list."""
    if isinstance(values, (Tensor, GradientEdge)):  # a union of types is slow to make
        return [values]
    if isinstance(values, (list, tuple)):
        return list(values)
    return list(values.values() if isinstance(values, Mapping) else values)


def needs_grad(value: Any) -> bool:
    """Whether a backward can start from this value, or compute its gradient."""
    return value.requires_grad if isinstance(value, Tensor) else isinstance(value, GradientEdge)


def edge_of(root: Root) -> Edge:
    """The (node, number of the node's output) that stands for a tensor in its graph."""
    if isinstance(root, GradientEdge):
        return root[:2]
    node = root.grad_fn
    if node is not None:
        return node, root.output_nr
    # A leaf has no grad_fn: its node is found below a view. A subclass's view would be a view of a view.
    with torch.set_grad_enabled(True), torch._C.DisableTorchFunctionSubclass():
        edge: Edge = root.view_as(root).grad_fn.next_functions[0]  # type: ignore[union-attr, assignment]
    return edge


def _fits(output: Root, grad: Any) -> bool:
    if not isinstance(grad, Tensor):
        return False
    if isinstance(output, Tensor):
        return output.shape == grad.shape and output.device == grad.device
    meta = _shape_and_device(output)
    return [*grad.shape] == meta.shape and grad.device == meta.device


def _shape_and_device(output: Root) -> Any:
    """An object with the attributes shape and device of the output."""
    return output if isinstance(output, Tensor) else output.node._input_metadata[output.output_nr]


def _misfit(position: int, output: Root, grad: Any) -> ValueError:
    if not isinstance(grad, Tensor):
        return ValueError(f"the gradient of output {position} is a {type(grad).__name__}, not a tensor")
    meta = _shape_and_device(output)
    return ValueError(
        f"the gradient of output {position} is {tuple(grad.shape)} on {grad.device}, "
        f"the output {tuple(meta.shape)} on {meta.device}: they must match"
    )

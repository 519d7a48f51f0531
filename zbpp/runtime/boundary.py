"""What passes between two stages, and what a stage may return.

The graph of one stage ends at its boundary, whether the next stage is on the same rank or on another:

    F of stage s        outputs --detach_outputs--> message --graph_input--> inputs of F of stage s + 1
    B of stage s + 1    gradients of its inputs --detach_gradient--> message --> B of stage s

A message between two stages of one rank looks as if it had been sent, so results don't depend on the
placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention.flex_attention import BlockMask

from zbpp.autograd.models.sharded import is_on_mesh
from zbpp.runtime.layout import Message


class BoundaryError(ValueError):
    """A stage returned something that can't pass to the next stage."""


def checked_outputs(stage: int, output: Any) -> tuple[Tensor | None, ...]:
    """The outputs of a stage's module as a tuple, None where one is left out. Raises BoundaryError."""
    outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
    others = [each for each in outputs if not isinstance(each, Tensor)]
    if len(others) == len(outputs) or any(each is not None for each in others):
        found = ", ".join(type(each).__name__ for each in outputs) or "nothing"
        hint = "; of a dict, return tuple(output.values())" if isinstance(output, Mapping) else ""
        if any(isinstance(each, BlockMask) for each in others):
            hint = (
                "; give a BlockMask to step() as a keyword, which all stages get, or return the tensors that "
                "its mask_mod reads, and let each stage call create_block_mask"
            )
        raise BoundaryError(
            f"stage {stage} returned {found}: a stage returns a tensor, or a tuple of tensors (None where "
            f"one is left out), the next one's positional arguments{hint}"
        )
    for each in outputs:
        if each is not None:
            _refuse_unsendable(stage, each)
    return outputs


def _refuse_unsendable(stage: int, output: Tensor) -> None:
    """Raise BoundaryError for a nested or sparse tensor, and for a DTensor.

    Also between two stages of one rank, since a stage must fit every placement.
    """
    if output.is_nested:
        what, instead = "a nested tensor", "torch.nested.to_padded_tensor(y, 0.0)"
    elif output.layout is not torch.strided:
        what, instead = "a sparse tensor", "y.to_dense(), or its indices and values"
    elif type(output) is not Tensor and is_on_mesh(output):
        what = "a DTensor"
        instead = (
            "y.full_tensor(), or end the tensor-parallel plan with output_layouts=Replicate() and "
            "use_local_output=True"
        )
    else:
        return
    raise BoundaryError(
        f"stage {stage} returned {what}; only dense tensors of one rank pass between stages: return {instead}"
    )


def detach_outputs(outputs: Iterable[Tensor | None]) -> Message:
    """The outputs of F as a message: detached, contiguous, each in memory of its own.

    Each tensor's requires_grad tells the next stage whether a gradient is wanted back.

    Tensors that were sent never share memory. Two outputs of one rank may, and then a next stage that changes
    one of them in place would change the other: the second one is copied.
    """
    message = tuple([_detach_output(each) for each in outputs])
    if len(message) == 1:
        return message
    seen: set[int] = set()
    return tuple([_in_own_memory(each, seen) for each in message])


def _detach_output(output: Tensor | None) -> Tensor | None:
    return None if output is None else output.detach().contiguous().requires_grad_(output.requires_grad)


def _in_own_memory(tensor: Tensor | None, seen: set[int]) -> Tensor | None:
    """The tensor, or a copy if its memory is among `seen`; otherwise its memory is added to `seen`."""
    if tensor is None:
        return None
    memory = tensor.untyped_storage()._cdata  # not data_ptr(): fake tensors have none
    if memory in seen:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    seen.add(memory)
    return tensor


def detach_gradient(grad: Tensor | None) -> Tensor | None:
    """A gradient as it leaves a stage: without a graph, dense, contiguous."""
    if grad is None:
        return None
    return (grad if grad.layout is torch.strided else grad.to_dense()).detach().contiguous()


def graph_input(value: Any) -> Any:
    """An input of F as the root of a new graph; an input that requires no grad is returned as it is.

    The result is neither a leaf nor a view of a leaf: a stage may start with an in-place operation, which
    autograd refuses on both.
    """
    return _SameMemory.apply(value) if isinstance(value, Tensor) and value.requires_grad else value  # type: ignore[no-untyped-call]  # torch's


class _SameMemory(torch.autograd.Function):
    """The identity. Its output shares the input's memory, but autograd doesn't see a view of the input.

    Input and output also share the count of in-place changes: where two stages are on one rank, the second
    may change a tensor that the first has saved for its B, and that B must notice the change.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def gradient_edge(value: Any) -> GradientEdge | None:
    """Where the gradient of `value` enters or leaves its graph; None for a value that requires no grad.

    The same as torch's get_gradient_edge, in half the time.
    """
    if not (isinstance(value, Tensor) and value.requires_grad):
        return None
    node = value.grad_fn
    if node is None:  # a leaf
        return get_gradient_edge(value)
    # The node of a custom autograd Function lives only as long as its outputs, or as another node that refers
    # to it. The outputs may be gone when B runs. The node of a view of `value` refers to it, and is kept.
    keeper = value.view_as(value).grad_fn if issubclass(type(node), BackwardCFunction) else None
    return GradientEdge(node, value.output_nr, keeper)

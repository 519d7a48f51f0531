"""Linear layers of several experts at once, over rows that are sorted by expert.

    x [rows, in], weight [experts, in, out]  ->  y [rows, out];  counts [experts]: rows of each

torch's grouped_mm computes it in one kernel, but not for float64, nor on old GPUs, nor for sizes that are no
multiple of 16 bytes. There one product per expert is computed, and the host waits for the counts. An expert
without rows gets a gradient of zeros.

As in linear_cross_entropy.py two Functions share the work, since the backward of one can't know whether W
computes its weight's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zbpp.autograd.adding import add_grouped_product, add_product
from zbpp.autograd.capture import Capture, HeldTensors, is_kept
from zbpp.autograd.collector import refuse_create_graph
from zbpp.autograd.rules import rule


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The rows of each expert times its matrix [in, out]; see above. A backward with create_graph is refused.

    Write weight.mT for a weight [experts, out, in], as of nn.Linear.
    """
    y: Tensor = _ProductOfWeight.apply(weight, x.detach(), counts)  # type: ignore[no-untyped-call]  # torch's
    if x.requires_grad and torch.is_grad_enabled():
        y = _ProductOfInput.apply(y, x, weight.detach(), counts)  # type: ignore[no-untyped-call]
    return y


def _product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    y = x.new_empty(len(x), weight.shape[2])
    if isinstance(x, FakeTensor):  # a prediction of memory: no values
        return y
    if _has_kernel(x, weight):
        return F.grouped_mm(x, weight, offs=_ends(counts))
    for rows, expert in _per_expert(counts):
        torch.mm(x[rows], weight[expert], out=y[rows])
    return y


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


def _per_expert(counts: Tensor) -> Iterator[tuple[slice, int]]:
    """The rows of each expert that has any. Waits for the device."""
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            yield slice(begin, begin + count), expert
        begin += count


def _has_kernel(*factors: Tensor) -> bool:
    first = factors[0]
    if first.device.type == "cuda":
        is_known = first.dtype == torch.bfloat16 and torch.cuda.get_device_capability(first.device) >= (8, 0)
    else:
        is_known = first.dtype in (torch.float32, torch.bfloat16)
    return is_known and all(map(_is_aligned, factors)) and hasattr(F, "grouped_mm")


def _is_aligned(factor: Tensor) -> bool:
    """Whether grouped_mm takes this layout: one of the last two dimensions dense, the other in 16 bytes."""
    if not factor.numel() or factor.data_ptr() % 16:
        return False
    inner = sorted(factor.stride()[-2:])
    return inner[0] == 1 and all(
        stride * factor.element_size() % 16 == 0 for stride in (*factor.stride()[:-2], inner[1])
    )


class _ProductOfWeight(torch.autograd.Function):
    """The product; its gradient with respect to the weight."""

    changes_no_gradient = True  # see node_roles.py

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, counts)
        ctx.shape = weight.shape
        return _product(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph("grouped_linear", "write one product per expert in")
        gradient = dy.new_empty(ctx.shape)
        _add_grouped_product(gradient, ctx.saved_tensors, dy, True)
        return gradient, None, None


@rule("_ProductOfWeightBackward", weights=(0,))
def _product_of_weight(node: Any, operand: int) -> Capture | None:
    if not all(map(is_kept, node._raw_saved_tensors)):
        return None
    return Capture(tuple([each.detach() for each in node.saved_tensors]), _add_grouped_product)


def _add_grouped_product(target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
    x, counts = held
    dy = dy.contiguous()
    if isinstance(dy, FakeTensor):
        return None
    # On a CPU the counts are at hand, and products per expert are summed in a wider target's dtype.
    if _has_kernel(x, dy) and (target.dtype == dy.dtype or x.device.type != "cpu"):
        return add_grouped_product(target, x, dy, _ends(counts), fresh)
    if fresh:
        target.zero_()
    for rows, expert in _per_expert(counts):
        add_product(target[expert], x[rows].t(), dy[rows], False)
    return None


class _ProductOfInput(torch.autograd.Function):
    """The product as it is, with its gradient with respect to x."""

    changes_no_gradient = True

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(weight, counts)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_create_graph("grouped_linear", "write one product per expert in")
        weight, counts = ctx.saved_tensors
        return dy, _product(dy.contiguous(), weight.mT, counts), None, None

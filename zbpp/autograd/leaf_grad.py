"""Where the gradients of a leaf are summed: in its `main_grad` if it has one, else in its `.grad`."""

from __future__ import annotations

import torch
from torch import Tensor


def total_of(leaf: Tensor) -> Tensor | None:
    """The tensor that the gradients of a leaf are summed in; None if there is none yet."""
    main: Tensor | None = getattr(leaf, "main_grad", None)
    return leaf.grad if main is None else main


def add_to_grad(leaf: Tensor, gradient: Tensor) -> None:
    """Add to the leaf's `main_grad` or `.grad`; the gradient itself stays as it is and is not kept."""
    total = total_of(leaf)
    if total is None:
        # The first gradient is copied, in the parameter's layout (a sparse one stays sparse). A captured
        # gradient may share its memory with another one, with dy or with the gradient that the next stage
        # sent, or be expanded (stride 0).
        leaf.grad = gradient.clone() if gradient.is_sparse else new_gradient(leaf).copy_(gradient)
    elif total.is_sparse and not gradient.is_sparse:
        leaf.grad = gradient + total
    else:
        total.add_(gradient)


def grad_dtype(leaf: Tensor) -> torch.dtype:
    """The dtype that the leaf's `.grad` is to have."""
    return getattr(leaf, "grad_dtype", None) or leaf.dtype


def new_gradient(leaf: Tensor) -> Tensor:
    """Uninitialised memory for a gradient, in the leaf's layout."""
    return torch.empty_like(leaf, dtype=grad_dtype(leaf))

"""Where the gradients of a leaf are summed: in its `main_grad` if it has one, else in its `.grad`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zbpp.autograd.hooks import Internal


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


def sum_dtype(leaf: Tensor) -> torch.dtype:
    """The dtype that the leaf's gradients are summed in: that of its `main_grad`, or the one of `.grad`."""
    main: Tensor | None = getattr(leaf, "main_grad", None)
    return grad_dtype(leaf) if main is None else main.dtype


def new_gradient(leaf: Tensor) -> Tensor:
    """Uninitialised memory for a gradient, in the leaf's layout."""
    return torch.empty_like(leaf, dtype=grad_dtype(leaf))


@contextmanager
def set_aside(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the leaves have no `main_grad`, and `.grad` begins with None; afterwards both are back."""
    before: list[tuple[Any, Tensor | None, Tensor | None]] = [
        (leaf, leaf.grad, getattr(leaf, "main_grad", None)) for leaf in leaves
    ]
    for leaf, _, main in before:
        leaf.grad = None
        if main is not None:
            leaf.main_grad = None
    try:
        yield
    finally:
        for leaf, grad, main in before:
            leaf.grad = grad
            if main is not None:
                leaf.main_grad = main


class _AddAtOnce(Internal):
    """A hook of a leaf: adds the gradient. In place of a plain one the pass keeps zeros without memory."""

    def __init__(self, leaf: Tensor) -> None:
        self.leaf = leaf

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        add_to_grad(self.leaf, gradient)
        is_plain = type(gradient) is Tensor and gradient.layout is torch.strided
        return gradient.new_zeros(()).expand_as(gradient) if is_plain else None  # None: as it is


@contextmanager
def added_at_once(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside, a pass that captures the gradients of these leaves adds them instead, each once it is whole.

    The leaves have no hooks but zbpp's own: a pass around this one may guard them. What the pass captures for
    them has no meaning.
    """
    mine: list[tuple[Any, Any, _AddAtOnce]] = [
        (leaf, leaf._backward_hooks, _AddAtOnce(leaf)) for leaf in leaves
    ]
    for leaf, hooks, add in mine:
        if hooks is None:
            leaf._backward_hooks = OrderedDict()
        leaf._backward_hooks[add] = add
    try:
        yield
    finally:
        for leaf, hooks, add in mine:
            del leaf._backward_hooks[add]  # the leaf's node holds this dictionary
            leaf._backward_hooks = hooks


class _ToMainGrad(Internal):
    """The first post-accumulate hook of a leaf: moves what autograd has put into `.grad` to `main_grad`."""

    def __call__(self, leaf: Any) -> None:
        if leaf.grad is not None:
            leaf.main_grad.add_(leaf.grad)
            leaf.grad = None


@contextmanager
def engine_adds_to_main_grad(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Inside, a backward adds the gradient of a leaf with a `main_grad` there; its `.grad` stays as it is.

    Users' post-accumulate hooks find the sum in `main_grad`, and None in `.grad`.
    """
    mine = [leaf for leaf in leaves if getattr(leaf, "main_grad", None) is not None]
    before = [(leaf, leaf.grad, leaf._post_accumulate_grad_hooks or {}) for leaf in mine]
    for leaf, _, hooks in before:
        leaf.grad = None
        move = _ToMainGrad()
        leaf._post_accumulate_grad_hooks = {move: move, **hooks}
    try:
        yield
    finally:
        for leaf, grad, hooks in before:
            leaf.grad = grad
            leaf._post_accumulate_grad_hooks = hooks

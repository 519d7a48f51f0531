"""How autograd Functions take part in the split: each B gives those in its graph a collector.

It rides on the node, which is the Function's `ctx`: on CUDA a Python backward runs on autograd's
own threads, where no thread or context variable of the caller's would be found.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from zbpp.autograd.arrivals import has_hooks
from zbpp.autograd.rules import version_of
from zbpp.autograd.weight_grads import Custom, Work

Gradients = Sequence[Tensor | None]


class Collector:
    """Takes the work that Functions put off while one B runs: `zbpp_collector` of their nodes.

    inputs: that B's; wanted: as in `survey`; is_hooked: as in `split`.
    """

    def __init__(self, inputs: tuple[Any, ...], wanted: set[int] | None, is_hooked: bool) -> None:
        self.inputs, self.wanted, self.is_hooked = inputs, wanted, is_hooked
        self.work: list[Work] = []
        # A checkpoint may close over a tensor that was computed from the inputs. Its own B then finds
        # gradients of the inputs, too, which are added to those of this B.
        self.input_grads: list[Gradients] = []

    def may_defer(self, leaf: Tensor) -> bool:
        """Not what B itself is asked for; nor what tensor hooks wait for: they see the whole gradient."""
        return not has_hooks(leaf) and not any(leaf is each for each in self.inputs)

    def added_to(self, grads: Gradients, work: list[Work]) -> tuple[tuple[Tensor | None, ...], list[Work]]:
        """What B found, and what was collected meanwhile."""
        return tuple(map(_sum, zip(grads, *self.input_grads, strict=True))), work + self.work


def _sum(grads: Gradients) -> Tensor | None:
    there = [grad for grad in grads if grad is not None]
    return functools.reduce(operator.add, there) if there else None


def collector_of(ctx: Any) -> Collector | None:
    """The collector of the B that runs this Function's backward; None in a plain backward."""
    return getattr(ctx, "zbpp_collector", None)


def defer(ctx: Any, leaf: Tensor, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor | None:
    """For the backward of a custom autograd Function: put the gradient of a weight off until W.

    Returns what to return as that weight's gradient: under `backward_input` None, and W adds
    `compute(*tensors)`; in a plain backward, or if the weight is no leaf or has tensor hooks, the
    gradient itself.
    `tensors` are all that compute may use; they are kept until W.

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            return dy @ weight, defer(ctx, weight, lambda dy, x: dy.T @ x, dy, x)
    """
    collector = collector_of(ctx)
    held = tuple(tensor.detach() for tensor in tensors)
    if collector is None or not (leaf.is_leaf and leaf.requires_grad and collector.may_defer(leaf)):
        return compute(*held)
    if collector.wanted is None or id(leaf) in collector.wanted:
        collector.work.append(Custom(leaf, compute, held, version_of(held)))
    return None

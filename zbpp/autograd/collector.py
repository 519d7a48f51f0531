"""How an autograd Function takes part in the split: its backward can put off a weight gradient until W.

For the time of its pass, each B hands a Collector to the Functions in its graph. The Collector is an
attribute of the Function's node, which is also the Function's `ctx`. It can't be a thread variable or a
context variable: on CUDA, Python backward functions run on autograd's own threads, which don't see those.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from zbpp.autograd.capture import version_of
from zbpp.autograd.node_roles import leaf_tensor
from zbpp.autograd.weight_grads import FunctionTask, Task

Gradients = Sequence[Tensor | None]


class Collector:
    """Takes the tasks that Functions put off while one B runs: the attribute `zbpp_collector` of their nodes.

    inputs: the inputs of this B. wanted: as in `survey`. is_hooked, keep, at_once: as in `split`.
    large: gradients that Functions have made and that W needs, larger than all else that it holds. The tasks
    that hold them may run right after B, see WeightGrads.is_large.
    """

    def __init__(
        self, inputs: tuple[Any, ...], wanted: set[int] | None, is_hooked: bool, keep: bool, at_once: bool
    ) -> None:
        self.inputs, self.wanted, self.is_hooked, self.keep = inputs, wanted, is_hooked, keep
        self.at_once = at_once
        self.tasks: list[Task] = []
        self.large: list[Tensor] = []
        # A checkpoint's function may close over a tensor that was computed from the inputs. The split of its
        # recompute then finds gradients of these inputs, too, which are added to those of this B.
        self.input_grads: list[Gradients] = []

    def put_off(self, tasks: list[Task]) -> None:
        """Take tasks of W. If W follows B at once they run now, and each leaves the list: its tensors go."""
        if not self.at_once:
            self.tasks += tasks
            return
        with torch.set_grad_enabled(False):
            while tasks:
                tasks.pop(0).accumulate()

    def may_defer(self, leaf: Tensor) -> bool:
        """Whether W may compute this leaf's gradient: B itself has to return it if the leaf is an input."""
        return not any(leaf is each for each in self.inputs)

    def added_to(
        self, grads: list[Tensor | None], tasks: list[Task]
    ) -> tuple[list[Tensor | None], list[Task]]:
        """The input gradients and tasks that B found, with the collected ones."""
        if self.input_grads:
            grads = [*map(_sum, zip(grads, *self.input_grads, strict=True))]
        return grads, self.tasks + tasks


def _sum(grads: Gradients) -> Tensor | None:
    existing = [grad for grad in grads if grad is not None]
    return functools.reduce(operator.add, existing) if existing else None


def collector_of(ctx: Any) -> Collector | None:
    """The collector of the B that runs this Function's backward; None in a plain backward."""
    return getattr(ctx, "zbpp_collector", None)


def refuse_create_graph(what: str, remedy: str) -> None:
    """Raise RuntimeError in a backward with create_graph=True: `what` can't be differentiated twice."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"a backward with create_graph=True goes through {what}: {remedy} the part of the model that a "
            "gradient penalty differentiates twice"
        )


def defer(ctx: Any, weight: Tensor, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor | None:
    """Put off the gradient of a weight until W; called in the backward of a custom autograd Function.

    The Function's backward returns the result as that weight's gradient. Under `backward_input` the result is
    None, and W adds `compute(*tensors)` to `.grad`. In a plain backward, or if the weight is no leaf, the
    result is the gradient itself.
    weight: as forward got it, or as `ctx.saved_tensors` unpacks it. compute may use no tensors but `tensors`,
    which are kept until W.

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            return dy @ weight, defer(ctx, weight, lambda dy, x: dy.T @ x, dy, x)
    """
    collector = collector_of(ctx)
    # Gradients are on only in a plain backward with create_graph=True, which differentiates the result again.
    held = tensors if torch.is_grad_enabled() else tuple(tensor.detach() for tensor in tensors)
    if collector is None or not (weight.is_leaf and weight.requires_grad):
        return compute(*held)
    # Within saved-tensor hooks, ctx.saved_tensors holds a copy of the leaf. Only its edge leads to the leaf.
    leaf = leaf_tensor(get_gradient_edge(weight).node)
    if not (leaf.requires_grad and collector.may_defer(leaf)):
        return compute(*held)
    if collector.wanted is None or id(leaf) in collector.wanted:
        collector.put_off([FunctionTask(leaf, compute, held, version_of(held))])
    return None

"""What arrives at the targets of B's pass, where Python code may run in the pass.

Autograd hands one gradient to several nodes: in `f(x) + l(x)`, f and l get the same dy. Python code,
the backward of a Function or a tensor hook, may change that dy in place once l has been given it.
A plain backward has computed l's weight gradient by then; W has not. So the version of each
gradient is noted as the gradient arrives, and when the pass is over none may have changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Hooked = dict[int, tuple[Tensor | None, ...]]


class Arrivals:
    """The gradients that have arrived at sites and leaves, each with its version on arrival."""

    def __init__(self, sites: Iterable[Any], leaves: Iterable[Tensor]) -> None:
        self._seen: dict[int, tuple[Tensor, int]] = {}
        self._leaves: list[tuple[Any, Any]] = [(leaf, leaf._backward_hooks) for leaf in leaves]
        for leaf, hooks in self._leaves:
            if hooks is None:
                leaf._backward_hooks = OrderedDict()
            leaf._backward_hooks[self] = self._note
        # A tensor's hooks run also for a node that does not run itself, which a prehook's do not; they
        # are a dictionary that the tensor gives its node. This tensor stands for the output of each site.
        self._noting: dict[Any, Any] = {self: self._note}
        output = torch.empty(0)
        output._backward_hooks = self._noting
        for site in sites:
            site._register_hook_dict(output)

    def _note(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._seen.setdefault(id(gradient), (gradient, gradient._version))

    def end(self) -> list[Tensor]:
        """Remove the hooks; returns the gradients that were changed after they had arrived."""
        self._noting.clear()
        for leaf, hooks in self._leaves:
            del leaf._backward_hooks[self]
            if hooks is None and not leaf._backward_hooks:
                leaf._backward_hooks = None
        changed = [gradient for gradient, version in self._seen.values() if gradient._version != version]
        self._seen.clear()
        return changed


def has_hooks(leaf: Tensor) -> bool:
    """Whether a leaf has tensor hooks other than those with which B notes arrivals."""
    keys: Iterable[Any] = leaf._backward_hooks or ()
    return any(type(key) is not Arrivals for key in keys)


def after_hooks(targets: list[GradientEdge], first: int) -> Hooked:
    """Return a dictionary that B's pass fills: position of a site in `targets` -> (dy,).

    The sites are targets[first:]. dy is what the tensor hooks on the site's output make of the gradient.

    Autograd captures a node's gradient before the node's hooks if the node runs, after them if it does not.
    """
    dys: Hooked = {}
    for position in range(first, len(targets)):
        node = targets[position].node
        node.register_prehook(partial(dys.__setitem__, position))  # no Python frame per site
    return dys

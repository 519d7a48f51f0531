"""A guard against changes in place of gradients that B's pass has captured.

Autograd hands one gradient to several nodes: in `f(x) + l(x)` both f and l get the same dy. Python code that
runs in the pass, the backward of a Function or a tensor hook, may change that dy in place after l was given
it. In a plain backward l's weight gradient has been computed by then. In the split it has not: W computes it
from dy. So the guard notes the version of each gradient when a site or a leaf is given it. When the pass is
over, no version may have changed. A DTensor and its shard have a version each, and both count.

The guard also takes the dy of each site. If the pass stops at a site, autograd itself captures dy after the
tensor hooks of the site's output. If the site's node runs, autograd captures dy before these hooks. The
guard's hook is the last of them, so in both cases it sees the dy that they return.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zbpp.autograd.hooks import Internal
from zbpp.autograd.storages import tensors_inside


class GradientGuard(Internal):
    """The gradients that sites and leaves were given so far, each with its version at that moment.

    leaves: those that B computes gradients of.
    dys: the number of a site -> its dy, None where the pass brought no dy.
    """

    def __init__(self, sites: Iterable[Any], leaves: Iterable[Tensor]) -> None:
        self.dys: dict[int, Tensor | None] = {}
        self._seen: dict[int, tuple[Tensor, int]] = {}
        self._leaves: list[tuple[Any, Any]] = [(leaf, leaf._backward_hooks) for leaf in leaves]
        for leaf, hooks in self._leaves:
            if hooks is None:
                leaf._backward_hooks = OrderedDict()
            leaf._backward_hooks[self] = self._note
        # A node's prehooks run only if the node runs, and the pass may stop at a site. Tensor hooks run in
        # both cases. A tensor keeps its hooks in a dictionary and registers that at its node: so one empty
        # tensor, `output`, registers a dictionary at every site, one after the other.
        self._registered: list[dict[Any, Any]] = []
        output = torch.empty(0)
        for number, site in enumerate(sites):
            hooks = {self: partial(self._take, number)}
            self._registered.append(hooks)
            output._backward_hooks = hooks
            site._register_hook_dict(output)

    def _note(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._seen.setdefault(id(gradient), (gradient, _version_of(gradient)))

    def _take(self, number: int, gradient: Tensor | None) -> None:
        self.dys[number] = gradient
        self._note(gradient)

    def end(self) -> list[Tensor]:
        """Remove the guard's hooks; returns the gradients that were changed after they were noted."""
        for each in self._registered:
            each.clear()
        for leaf, hooks in self._leaves:
            del leaf._backward_hooks[self]
            if hooks is None and not leaf._backward_hooks:
                leaf._backward_hooks = None
        changed = [gradient for gradient, version in self._seen.values() if _version_of(gradient) != version]
        self._seen.clear()
        return changed


def _version_of(gradient: Tensor) -> int:
    if type(gradient) is Tensor:
        return gradient._version
    return sum([each._version for each in (gradient, *tensors_inside(gradient))])

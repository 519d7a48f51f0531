"""Hooks of parameters that several stages of one rank have: once per microbatch, on the sum over the stages.

               W of stage 3, microbatch 0     W of stage 0, microbatch 0
    weight     3's part is kept               + 0's part ──engine──► hooks, .grad

Without hooks each W adds its part to `.grad`, and nothing is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import Node

from zbpp.autograd.hooked_leaves import HookedTask, give_to_leaves
from zbpp.autograd.hooks import multi_grad_hooks, num_hooks_made
from zbpp.autograd.weight_grads import Task


class SharedHooks:
    """Keeps the parts of such gradients, from the W of one stage to the last W of the microbatch.

    stages: of the rank, those that share parameters among them; the loss is part of the last stage.
    """

    def __init__(self, stages: Mapping[int, Sequence[nn.Module]]) -> None:
        self._parameters = {
            stage: {each for module in modules for each in module.parameters()}
            for stage, modules in stages.items()
        }
        counts = Counter(each for own in self._parameters.values() for each in own)
        shared = {each for each, count in counts.items() if count > 1}
        self._shared = set(map(id, shared))
        self.stages = {stage for stage, own in self._parameters.items() if not own.isdisjoint(shared)}
        self._kept: dict[int, dict[Node, Tensor | None]] = {}  # by microbatch
        self._ended: dict[int, set[int]] = {}  # microbatch -> the stages whose W has run
        self._num_hooks = -1

    def begin(self) -> None:
        """Called before a step. Raises ValueError for a multi-grad hook over parameters of several stages."""
        if self._num_hooks == num_hooks_made():
            return
        stages: dict[int, set[int]] = {}
        for stage, own in self._parameters.items():
            for hook in (hook for each in own for hook in multi_grad_hooks(each)):
                stages.setdefault(id(hook.lock), set()).add(stage)
        for found in stages.values():
            if len(found) > 1:
                raise ValueError(
                    "a hook by register_multi_grad_hook watches parameters of the stages "
                    f"{', '.join(map(str, sorted(found)))}, whose gradients are ready at different times: "
                    "register one hook per stage, without the parameters that stages share"
                )
        self._num_hooks = num_hooks_made()

    def keep(self, tasks: Sequence[Task], microbatch: int) -> None:
        """Let W keep the gradients of shared leaves with hooks."""
        for task in tasks:
            if isinstance(task, HookedTask) and not self._shared.isdisjoint(map(id, task.leaves())):
                task.give = partial(self._add, microbatch)

    def _add(self, microbatch: int, nodes: Sequence[Node], gradients: Sequence[Tensor | None]) -> None:
        kept = self._kept.setdefault(microbatch, {})
        for node, gradient in zip(nodes, gradients, strict=True):
            before = kept.get(node)
            kept[node] = gradient if before is None else before if gradient is None else before + gradient

    def end_w(self, stage: int, microbatch: int) -> None:
        """A W has ended: after the microbatch's last one, the leaves get their gradients."""
        ended = self._ended.setdefault(microbatch, set())
        ended.add(stage)
        if ended == self.stages:
            del self._ended[microbatch]
            kept = self._kept.pop(microbatch, {})
            give_to_leaves([*kept], [*kept.values()])

    def abandon(self) -> None:
        """Drop what a call that failed has kept."""
        self._kept.clear()
        self._ended.clear()

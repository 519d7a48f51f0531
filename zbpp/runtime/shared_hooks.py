"""Hooks of parameters that several stages of one rank have: once per microbatch, on the sum over the stages.

               W of stage 3, microbatch 0     W of stage 0, microbatch 0
    weight     stage 3's gradient is kept     + stage 0's gradient ──engine──► hooks, .grad

Without hooks each W adds its gradient to `.grad`, and no gradient is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import Node

from zbpp.autograd.hooked_leaves import HookedTask, give_to_leaves
from zbpp.autograd.hooks import multi_grad_hooks, num_hooks_made
from zbpp.autograd.weight_grads import Task


class SharedHooks:
    """Sums the gradients of such parameters, from a microbatch's first W to its last one.

    Its argument: {stage of this rank: its modules}; the loss is part of the last stage. stages: those that
    share a parameter with another stage of this rank.
    """

    def __init__(self, stages: Mapping[int, Sequence[nn.Module]]) -> None:
        found: dict[nn.Parameter, set[int]] = {}
        for stage, modules in stages.items():
            for each in (each for module in modules for each in module.parameters()):
                found.setdefault(each, set()).add(stage)
        self._stages_of = {each: frozenset(own) for each, own in found.items()}
        shared = {each: own for each, own in self._stages_of.items() if len(own) > 1}
        self._shared = set(map(id, shared))
        self.stages = set().union(*shared.values())
        self._kept: dict[int, dict[Node, Tensor | None]] = {}  # by microbatch
        self._ended: dict[int, set[int]] = {}  # microbatch -> the stages whose W has run
        self._num_hooks = -1

    def begin(self) -> None:
        """Called before a step. Raises ValueError for a multi-grad hook over parameters of several stages."""
        if self._num_hooks == num_hooks_made():
            return
        watched: dict[int, set[frozenset[int]]] = {}
        for parameter, stages in self._stages_of.items():
            for hook in multi_grad_hooks(parameter):
                watched.setdefault(id(hook.lock), set()).add(stages)
        for found in watched.values():
            if len(found) > 1:
                names = ", ".join(map(str, sorted(frozenset[int]().union(*found))))
                raise ValueError(
                    f"a hook by register_multi_grad_hook watches parameters of the stages {names}, whose "
                    "gradients are ready at different times: register a hook for each stage, and one for the "
                    "parameters that stages share"
                )
        self._num_hooks = num_hooks_made()

    def keep(self, tasks: Sequence[Task], microbatch: int) -> None:
        """Let these tasks of a W give the gradients of shared leaves to this object, not to the leaves."""
        for task in tasks:
            if isinstance(task, HookedTask) and not self._shared.isdisjoint(map(id, task.leaves())):
                task.give = partial(self._add, microbatch)

    def _add(self, microbatch: int, nodes: Sequence[Node], gradients: list[Tensor | None]) -> None:
        kept = self._kept.setdefault(microbatch, {})
        for node, gradient in zip(nodes, gradients, strict=True):
            before = kept.get(node)
            kept[node] = gradient if before is None else before if gradient is None else before + gradient

    def end_w(self, stage: int, microbatch: int) -> None:
        """The W of a stage has ended. After the microbatch's last W, give the sums to the leaves."""
        ended = self._ended.setdefault(microbatch, set())
        ended.add(stage)
        if ended == self.stages:
            del self._ended[microbatch]
            kept = self._kept.pop(microbatch, {})
            nodes = [*kept]
            give_to_leaves(nodes, [kept.pop(node) for node in nodes])

    def abandon(self) -> None:
        """Drop what a call that failed has kept."""
        self._kept.clear()
        self._ended.clear()

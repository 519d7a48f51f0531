"""A feature: hooks of parameters that several stages of a rank have, once per microbatch, on the stages' sum.

               W of stage 3, microbatch 0     W of stage 0, microbatch 0
    weight     stage 3's gradient is kept     + stage 0's gradient ──engine──► hooks, .grad

Without hooks each W adds its gradient to `.grad`, and no gradient is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import Node

from zbpp.autograd import WeightGrads
from zbpp.autograd.hooked_leaves import HookedTask, give_to_leaves
from zbpp.autograd.hooks import multi_grad_hooks, num_hooks_made
from zbpp.autograd.node_roles import leaf_tensor
from zbpp.runtime.call.feed import Call
from zbpp.runtime.extra import Feature
from zbpp.runtime.layout import Message, Run
from zbpp.runtime.rank import Rank
from zbpp.runtime.stage import RunW, StageWorker
from zbpp.schedule import Action, Op
from zbpp.schedule.program import Instruction


class SharedHooks(Feature):
    """Sums the gradients of such parameters, from a microbatch's first W to its last one."""

    name = "shared_hooks"

    def attach(self, rank: Rank) -> None:
        """Find the stages that share a parameter; a loss that is a module is part of the last stage."""
        self._stages_of = _stages_of(rank.workers, last=rank.timetable.num_stages - 1)
        shared = {each: own for each, own in self._stages_of.items() if len(own) > 1}
        self._shared = set(map(id, shared))
        self._sharing = set[int]().union(*shared.values())
        self._kept: dict[int, dict[Node, Tensor | None]] = {}  # by microbatch
        self._ended: dict[int, set[int]] = {}  # microbatch -> the stages whose W has run
        self._num_hooks = -1

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """After a microbatch's last W in a stage that shares a parameter, give the sum to the parameter."""
        if not (isinstance(at, Action) and at.op in (Op.W, Op.BW) and at.stage in self._sharing):
            return run

        def run_whole(message: Message) -> Message:
            result = run(message)
            self._end_w(at.stage, at.microbatch)
            return result

        return run_whole

    def around_w(self, stage: int, run_w: RunW) -> RunW:
        """Keep the gradient of a parameter that stages share until the microbatch's last W."""
        if stage not in self._sharing:
            return run_w

        def run(microbatch: int, weight_grads: WeightGrads) -> None:
            self._take_from(weight_grads, microbatch)
            run_w(microbatch, weight_grads)

        return run

    def begin(self, call: Call) -> None:
        """See Extra. Raises ValueError for a multi-grad hook over parameters of several stages."""
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

    def fail(self, error: BaseException) -> None:
        """See Extra."""
        self._kept.clear()
        self._ended.clear()

    def _take_from(self, weight_grads: WeightGrads, microbatch: int) -> None:
        """Let a W give the gradients of shared leaves to this object, not to the leaves."""
        for task in weight_grads.tasks:
            hooked = map(leaf_tensor, task.nodes) if isinstance(task, HookedTask) else ()
            if isinstance(task, HookedTask) and not self._shared.isdisjoint(map(id, hooked)):
                task.give = partial(self._add, microbatch)

    def _add(self, microbatch: int, nodes: Sequence[Node], gradients: list[Tensor | None]) -> None:
        kept = self._kept.setdefault(microbatch, {})
        for node, gradient in zip(nodes, gradients, strict=True):
            before = kept.get(node)
            kept[node] = gradient if before is None else before if gradient is None else before + gradient

    def _end_w(self, stage: int, microbatch: int) -> None:
        """The W of a stage has ended. After the microbatch's last W, give the sums to the leaves."""
        ended = self._ended.setdefault(microbatch, set())
        ended.add(stage)
        if ended == self._sharing:
            del self._ended[microbatch]
            kept = self._kept.pop(microbatch, {})
            nodes = [*kept]
            give_to_leaves(nodes, [kept.pop(node) for node in nodes])


def _stages_of(workers: Mapping[int, StageWorker], last: int) -> dict[nn.Parameter, frozenset[int]]:
    """{a parameter of this rank: its stages}."""
    found: dict[nn.Parameter, set[int]] = {}
    for stage, worker in workers.items():
        loss = [worker.loss_fn] if stage == last and isinstance(worker.loss_fn, nn.Module) else []
        for each in (each for module in (worker.module, *loss) for each in module.parameters()):
            found.setdefault(each, set()).add(stage)
    return {each: frozenset(own) for each, own in found.items()}

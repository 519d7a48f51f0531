"""Which value of a step was the first that is NaN or infinite? The step's batch runs again, with hooks.

Hooks on all modules look at their outputs, and at the gradients of these. The first value is the first in the
order of data flow:

    for each microbatch: F of stage 0 ... F of the last stage, loss, B of the last stage ... B of stage 0
    (in slices: F's of the first slice, then of the next ones; B's of the last slice, then of those before)
    gradients at the end of the step, summed over replicas, shards and tied copies

A module may return -Infinity on purpose (a mask), so an output with -Infinity alone is not reported.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zbpp.autograd.leaf_grad import total_of
from zbpp.runtime.extra import Observer
from zbpp.runtime.layout import Message, Run
from zbpp.runtime.pipeline import Pipeline
from zbpp.runtime.processes.dtensors import local_of
from zbpp.runtime.rank import Rank
from zbpp.runtime.restored import Buffers
from zbpp.schedule import Action, Op
from zbpp.schedule.program import Instruction
from zbpp.schedule.units import Unit
from zbpp.seeding import restored_python_generators

_NAN, _INFINITY, _MINUS_INFINITY = "NaN", "Infinity", "-Infinity"
_AFTER = 2**31  # in the place of a microbatch: after the last one


@dataclass(frozen=True)
class NonFinite:
    """The first value of a step that was not finite.

    value: "NaN", "Infinity" or "-Infinity". kind: "output" of a module, "loss", "auxiliary loss", "gradient
    at the output" of a module (made by what the model computes from this output), "gradient" of a parameter.
    name: of the module, auxiliary loss or parameter; "" for a loss, and for the stage itself. microbatch:
    None for a gradient that was finite until it was summed over replicas, shards or ties. data_part: which
    replica or shard had it; None if there is one alone. note: what else is known.
    """

    value: str
    kind: str
    name: str
    stage: int
    microbatch: int | None = None
    data_part: int | None = None
    note: str = ""

    def __str__(self) -> str:
        name = f" of {self.name}" if self.name else ""
        microbatch = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        part = "" if self.data_part is None else f", data part {self.data_part}"
        note = f" ({self.note})" if self.note else ""
        where = f"stage {self.stage}{microbatch}{part}"
        return f"{self.value} first appeared in the {self.kind}{name}, {where}{note}"


_Seen = tuple[tuple[int, ...], NonFinite]  # and its place in the order


def find_non_finite(
    pipeline: Pipeline, *args: Any, target: Any = None, step: int | None = None, **kwargs: Any
) -> NonFinite | None:
    """Run a step's batch again and look at every value: where was the first that is NaN or infinite?

    args, target, kwargs: as given to `step`. step: the step whose random numbers are drawn, counted from 0;
    None: the last one. Call this before the weights are updated, or after an update was skipped. The answer
    is the same on every process; None: all values were finite this time. str(answer) is a sentence.

    Nothing is trained: weights, buffers, num_steps and the caller's random numbers stay. GRADIENTS ARE
    DROPPED, and a `main_grad` is set to zero. Compiled stages and CUDA graphs run eager. Raises ValueError
    for a pipeline that releases gradients, whose weights have changed. Collective.
    """
    if pipeline.released is not None:
        raise ValueError(
            "gradient release has updated the weights in the step, so it can't be run again: load the "
            "weights of an earlier step, and run it without GradientRelease"
        )
    pipeline.finish_update()
    number, losses = pipeline.num_steps, pipeline.step_losses
    args, target, kwargs = tree_map(_detached, (args, target, kwargs))
    _drop_gradients(pipeline)
    with restored_python_generators(), pipeline.using(_Search()) as search:
        pipeline.num_steps = number - 1 if step is None else step
        try:
            pipeline.step(*args, target=target, **kwargs)
            search.look_at_sums()
        finally:
            pipeline.num_steps, pipeline.step_losses = number, losses
            _drop_gradients(pipeline)
    found = [each for some in pipeline.place.gather(search.seen) for each in some]
    first = min(found, key=lambda each: (each[0], each[1].data_part or 0), default=None)
    return None if first is None else first[1]


class _Place(NamedTuple):
    """The place of an action in the order. slice, stage: negated in B and W, which descend."""

    microbatch: int
    is_backward: int
    slice: int
    stage: int


class _Search(Observer):
    """Looks at the values of one step. seen: those that are not finite, on this process."""

    name = "find_non_finite"

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._workers, self._last = rank.workers, rank.timetable.num_stages - 1
        self._part = rank.place.data_part if rank.place.num_data_parts > 1 else None
        self._now = _Place(0, 0, 0, 0)
        self._unit: int | None = None
        self.seen: list[_Seen] = []
        self._bad: set[int] = set()  # ids of the parameters whose gradient was seen
        self._buffers = Buffers(rank.modules)
        self._buffers.keep()
        self._hooks = ExitStack()
        for extra in rank.extras:
            if hasattr(extra, "paused"):  # CUDA graphs, which run no Python inside an action
                self._hooks.enter_context(extra.paused())
        for worker in self._workers.values():
            for name, module in worker.module.named_modules():
                paused = getattr(vars(module).get("forward"), "paused", None)
                if paused is not None:  # a CompiledForward: with hooks it would stay eager for good
                    self._hooks.enter_context(paused())
                handle = module.register_forward_hook(partial(self._returned, name), with_kwargs=True)
                self._hooks.callback(handle.remove)

    def close(self) -> None:
        """See Extra."""
        self._hooks.close()
        self._buffers.restore()

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """See Extra."""
        if not isinstance(at, Action):
            return run
        unit = at.microbatch
        number, index = (unit.microbatch, unit.slice) if isinstance(unit, Unit) else (unit, 0)
        is_f = at.op == Op.F
        now = _Place(number, 0, index, at.stage) if is_f else _Place(number, 1, -index, -at.stage)

        def looked_at(message: Message) -> Message:
            self._now, self._unit = now, unit
            result = run(message)
            if at.op == Op.F:
                self._look_at_losses(at.stage)
            elif at.op != Op.B:
                self._look_at_gradients(at.stage)
            return result

        return looked_at

    def look_at_sums(self) -> None:
        """Look at the gradients when all reductions have ended."""
        self._unit = None
        for stage in self._workers:
            self._now = _Place(_AFTER, 1, 0, -stage)
            self._look_at_gradients(stage)

    def _returned(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The hook behind each module's forward, which a recompute in B calls, too."""
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.grad_fn is not None:
                each.register_hook(partial(self._came_back, name))
        if self._now.is_backward == 0 and (value := kind_of(output)) != _MINUS_INFINITY:
            given = {"input": (args, kwargs), "parameters": [*module.parameters(recurse=False)]}
            bad = [f"{kind} in its {what}" for what, each in given.items() if (kind := kind_of(each))]
            self._note(value, "output", name, ", ".join(bad) or "its input is finite")

    def _came_back(self, name: str, gradient: Tensor) -> None:
        """The hook of the gradient of a module's output."""
        self._note(kind_of(gradient), "gradient at the output", name)

    def _look_at_losses(self, stage: int) -> None:
        worker = self._workers[stage]
        for name, values in worker.named.items():
            self._note(kind_of(values[-1]), "auxiliary loss", name)
        if stage == self._last:
            self._note(kind_of(worker.losses[-1]), "loss")

    def _look_at_gradients(self, stage: int) -> None:
        """Look at the gradients that were finite before, those of the last modules first."""
        for name, parameter in reversed([*self._workers[stage].module.named_parameters()]):
            if id(parameter) not in self._bad and (value := kind_of(total_of(parameter))):
                self._bad.add(id(parameter))
                self._note(value, "gradient", name)

    def _note(self, value: str, kind: str, name: str = "", note: str = "") -> None:
        if value:
            found = NonFinite(value, kind, name, abs(self._now.stage), self._unit, self._part, note)
            self.seen.append(((*self._now, len(self.seen)), found))


def _drop_gradients(pipeline: Pipeline) -> None:
    for parameter in pipeline.parameters():
        parameter.grad = None
        main_grad = total_of(parameter)
        if main_grad is not None:
            main_grad.zero_()


def kind_of(values: Any) -> str:
    """What the tensors of a nest hold beside numbers: "NaN", else "Infinity", else "-Infinity", else ""."""
    kinds = [_kind_of(each) for each in tree_leaves(values) if isinstance(each, Tensor)]
    return next((kind for kind in (_NAN, _INFINITY, _MINUS_INFINITY) if kind in kinds), "")


@torch.no_grad()
def _kind_of(tensor: Tensor) -> str:
    tensor = local_of(tensor.detach())
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.device.type == "meta":
        return ""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() == 1:  # float8 has no isfinite
        tensor = tensor.float()
    if bool(tensor.isfinite().all()):
        return ""
    if bool(tensor.isnan().any()):
        return _NAN
    return _INFINITY if bool(tensor.isposinf().any()) else _MINUS_INFINITY


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value

"""Looks at every value of a step that is replayed, and keeps those that are NaN or infinite.

The replay runs one microbatch after the other, so that it needs little memory; no schedule changes a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from zbpp.autograd.leaf_grad import total_of
from zbpp.runtime.bad_rows import bad_rows
from zbpp.runtime.gradient_origin import GradientOrigins, nodes_of
from zbpp.runtime.layout import Message
from zbpp.runtime.non_finite import MINUS_INFINITY, NAN, OF_LOSS, NonFinite, Seen, kind_of
from zbpp.runtime.stage import StageWorker
from zbpp.schedule import Action, Op, Timetable


def one_by_one(timetable: Timetable) -> Timetable:
    """A timetable of the same placement in which each rank works on one microbatch after the other."""
    rows = []
    for rank in range(timetable.num_ranks):
        stages = timetable.stages_of(rank)
        ops = [*((stage, Op.F) for stage in stages), *((stage, Op.BW) for stage in reversed(stages))]
        rows.append(
            [Action(*each, microbatch) for microbatch in range(timetable.num_microbatches) for each in ops]
        )
    return Timetable(rows)


def parameters_seen(stages: Mapping[int, nn.Module]) -> list[Seen]:
    """The parameters that are not finite. A frozen one may hold infinities, such as a mask."""
    seen = []
    for stage, module in stages.items():
        for place, (name, parameter) in enumerate(module.named_parameters()):
            value = kind_of(parameter)
            if value == NAN or (value and parameter.requires_grad):
                found = NonFinite(value=value, kind="parameter", stage=stage, name=name)
                seen.append(Seen((-1, stage, place), found, is_certain=True))
    return seen


def buffers_seen(stages: Mapping[int, nn.Module]) -> list[str]:
    """A text for each buffer that holds NaN. It may be unused, as BatchNorm's statistics in training."""
    return [
        f"buffer {name} of stage {stage} holds NaN"
        for stage, module in stages.items()
        for name, buffer in module.named_buffers()
        if kind_of(buffer) == NAN
    ]


class Watcher:
    """Does F and BW of the stages of one rank, and looks at every value.

    data_part: as in NonFinite. seen: the first value of each kind of place that is not finite.
    """

    def __init__(self, stages: Mapping[int, nn.Module], num_stages: int, data_part: int | None) -> None:
        self._stages, self._num_stages, self._data_part = stages, num_stages, data_part
        self.seen: list[Seen] = []
        self._number = 0  # of what was seen, for the order within an action
        self._stage: int | None = None  # of the F or BW that runs
        self._forward: tuple[int, int] | None = None  # stage and microbatch of the F that runs
        self._called: list[str] = []  # names of the modules in the order in which they returned in this F
        self._inputs: list[list[Node]] = []  # of the modules that run: the nodes that made their inputs
        self._origins = {stage: GradientOrigins(kind_of) for stage in stages}
        self._unconfirmed: list[Callable[[], None]] = []
        self._bad: set[int] = set()  # ids of the parameters whose gradient was seen
        self._orders: dict[int, list[str]] = {}  # stage -> its `_called`

    @property
    def methods(self) -> dict[Op, Callable[[StageWorker, int, Message], Message]]:
        """What an Executor calls instead of the methods of StageWorker."""
        return {Op.F: self.forward, Op.BW: self.backward}

    @contextmanager
    def watching(self) -> Any:
        """Within it every submodule of the stages tells when it returns."""
        handles, compiled = [], ExitStack()
        for stage, root in self._stages.items():
            for name, module in root.named_modules():
                paused = getattr(vars(module).get("forward"), "paused", None)
                if paused is not None:  # a CompiledForward: with hooks it would stay eager for good
                    compiled.enter_context(paused())
                # Not among the module's first hooks: what the caller's hooks make of the inputs counts.
                handles.append(module.register_forward_pre_hook(self._called_with, with_kwargs=True))
                returned = partial(self._returned, stage, name)
                handles.append(module.register_forward_hook(returned, with_kwargs=True))
        try:
            with compiled:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def forward(self, worker: StageWorker, microbatch: int, message: Message) -> Message:
        """F, with a look at what it is given and what it gives."""
        stage, is_last = worker.index, worker.index == self._num_stages - 1
        note = partial(self._note, (microbatch, 0, stage), stage=stage, microbatch=microbatch)
        args, keywords, target = worker.given(microbatch)
        note(kind_of(args), "input", is_certain=False, given=args)
        note(kind_of(message), "message", is_certain=False)
        for name, value in keywords.items():
            note(kind_of(value), "keyword", name=name, is_certain=False, given=value)
        if is_last:
            note(kind_of(target), "target", is_certain=False, given=target)
        counts = {name: len(values) for name, values in worker.named.items()}
        self._stage, self._forward, self._called = stage, (stage, microbatch), []
        try:
            result = worker.forward(microbatch, message)
        finally:
            self._stage, self._forward, self._orders[stage] = None, None, self._called
        origins = self._origins[stage]
        origins.own(OF_LOSS if is_last and worker.loss_fn is not None else "", worker.roots(microbatch))
        for name, values in worker.named.items():
            note(kind_of(values[counts.get(name, 0) :]), "auxiliary loss", name=name)
        if is_last:
            note(kind_of(worker.losses[-1]), "loss")
        else:
            note(kind_of(result), "output", is_certain=False)
        return result

    def backward(self, worker: StageWorker, microbatch: int, message: Message) -> Message:
        """BW, with a look at the gradients that it is given and that it gives."""
        stage = worker.index
        note = partial(self._note, (microbatch, 1, -stage), stage=stage, microbatch=microbatch)
        if stage < self._num_stages - 1:
            note(kind_of(message), "message", note="a gradient")
        self._stage = stage
        result = worker.backward(microbatch, message)
        self._stage = None
        bad = self._bad_gradients(worker.module)
        name, value = self._first_in_backward(stage, bad) if bad else ("", kind_of(result))
        origin = self._origins[stage].taken()
        if origin is not None:
            shown = f", and the gradient of {name} shows it first" if bad else ""
            made = f"{origin.operation}: the gradient that came to it is finite{shown}"
            told = partial(note, origin.value, "backward", name=origin.owner, note=made)
            if value:
                told()
            else:  # masked since, or in the gradients of shards, which are seen at the end
                self._unconfirmed.append(told)
        elif bad:
            others = f"and of {len(bad) - 1} other parameters" if len(bad) > 1 else ""
            note(value, "gradient", name=name, note=others)
        note(kind_of(result), "gradient")
        return result

    def _first_in_backward(self, stage: int, bad: list[tuple[str, str]]) -> tuple[str, str]:
        """The parameter whose gradient was the first, of those that are not finite.

        Backward goes from the last module to the first. When a module with parts uses a parameter of its own
        is not known: so its parts come before it.
        """
        called = {name: place for place, name in enumerate(self._orders.get(stage, []))}
        whole = {name for name, module in self._stages[stage].named_modules() if any(module.children())}

        def place_of(each: tuple[str, str]) -> tuple[bool, int]:
            owner = each[0].rpartition(".")[0]
            return owner not in whole, called.get(owner, -1)

        return max(bad, key=place_of)

    def look_at_sums(self) -> None:
        """Look at the gradients when all reductions have ended."""
        for stage, module in self._stages.items():
            for name, value in self._bad_gradients(module):
                while self._unconfirmed:
                    self._unconfirmed.pop(0)()
                found = NonFinite(
                    value=value, kind="reduced gradient", stage=stage, name=name, data_part=self._data_part
                )
                self.seen.append(Seen((2**31, stage), found, is_certain=True))

    def _bad_gradients(self, module: nn.Module) -> list[tuple[str, str]]:
        """(name, value) of the parameters whose gradient is not finite and was finite before."""
        bad = []
        for name, parameter in module.named_parameters():
            total = total_of(parameter)
            value = "" if total is None or id(parameter) in self._bad else kind_of(total)
            if value:
                self._bad.add(id(parameter))
                bad.append((name, value))
        return bad

    def _called_with(self, module: nn.Module, args: Any, keywords: Any) -> None:
        """The hook before each module's forward, which may change its inputs in place."""
        self._inputs.append(nodes_of((args, keywords)))

    def _returned(
        self, stage: int, name: str, module: nn.Module, args: Any, keywords: Any, output: Any
    ) -> None:
        """The hook behind each module's forward. A recompute in B has no news, but a graph of its own."""
        inputs = self._inputs.pop()
        if self._stage == stage:
            self._origins[stage].own(name, nodes_of(output), inputs)
        if self._forward is None or self._forward[0] != stage:
            return
        self._called.append(name)
        if stage == self._num_stages - 1 and not name and _is_loss(output):
            return  # the module returns the loss: `forward` looks at it
        value = kind_of(output)
        if not value:
            return
        given = kind_of((args, keywords))
        note = f"its input has {given}" if given else "its input is finite"
        order = (self._forward[1], 0, stage)
        self._note(
            order, value, "output", stage=stage, microbatch=self._forward[1], name=name, note=note,
            is_certain=False,
        )  # fmt: skip

    def _note(
        self,
        order: Sequence[int],
        value: str,
        kind: str,
        *,
        is_certain: bool = True,
        given: Any = None,
        **facts: Any,
    ) -> None:
        """Note a value. is_certain: whether -Infinity, too, is a fault here; no mask has this place.

        given: the data that hold it.
        """
        if not value:
            return
        rows = None if given is None else bad_rows(given)
        found = NonFinite(value=value, kind=kind, data_part=self._data_part, rows=rows, **facts)
        certain = is_certain or value != MINUS_INFINITY
        is_first = not any(
            each.order[: len(order)] == tuple(order) and each.is_certain == certain for each in self.seen
        )
        if is_first:
            self._number += 1
            self.seen.append(Seen((*order, self._number), found, certain))


def _is_loss(output: Any) -> bool:
    return isinstance(output, Mapping) or (isinstance(output, Tensor) and output.numel() == 1)

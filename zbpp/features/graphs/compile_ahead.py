"""Compile the stages of all ranks at once, before the first step, instead of one after the other inside it.

Stage 1 would learn the shapes of its inputs from the first message, and so compile only after stage 0 has
compiled and run. Dynamo tells the shapes of a stage's outputs in a twentieth of that time, and runs nothing:

    rank 0   read stage 0  --layout-->               compile stage 0 . . . . . . .   0F0
    rank 1                 read stage 1  --layout--> compile stage 1 . . . . . . .         1F0

A stage that Dynamo can't read whole, or that is not compiled as one (compile=layer), tells no shapes: the
stages behind it compile in their first F.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from zbpp.job.agreement import gather
from zbpp.runtime.boundary import graph_input
from zbpp.runtime.call.feed import Call
from zbpp.runtime.extra import Observer
from zbpp.runtime.layout import Layout, TensorLayout, layout_of
from zbpp.runtime.rank import Rank
from zbpp.runtime.stage import StageWorker
from zbpp.stage_api import own_loss

_log = logging.getLogger(__name__)


class CompileAhead(Observer):
    """Compiles stages given to `zbpp.autograd.compiled.compile_stage`, for the shapes of microbatch 0."""

    name = "compile_ahead"

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._rank = rank
        compiles = any(_compiled(worker) is not None for worker in rank.workers.values())
        several = rank.timetable.num_ranks > 1
        self._is_wanted = several and any(gather(compiles, rank.place.pipeline))

    def begin(self, call: Call) -> None:
        """Compile before the first step. Collective over the pipeline."""
        if not self._is_wanted or call.kind != "step":
            return
        self._is_wanted = False
        for forward, args, kwargs in self._calls():
            forward.compile(*args, **kwargs)

    def _calls(self) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
        """Let Dynamo read stage after stage. (CompiledForward, args, kwargs) of F on this rank's stages."""
        found = []
        layout: Layout = ()
        *others, last = enumerate(self._rank.timetable.rank_of)
        for stage, owner in (*others, last):
            outputs = None
            if owner == self._rank.index and (forward := _compiled(self._rank.workers[stage])) is not None:
                worker = self._rank.workers[stage]
                found.append((forward, _args(worker, layout), _kwargs(worker, is_last=stage == last[0])))
                outputs = None if stage == last[0] else _outputs(stage, *found[-1])
            if (next_one := gather(outputs, self._rank.place.pipeline)[owner]) is None:
                break
            layout = next_one
        return found


def _compiled(worker: StageWorker) -> Any:
    """The CompiledForward of a stage that is compiled as one; None for another stage."""
    forward = vars(worker.module).get("forward")
    return forward if getattr(forward, "compiles", False) else None


def _args(worker: StageWorker, layout: Layout) -> tuple[Any, ...]:
    """What F of microbatch 0 gives the module; in place of a message, tensors whose numbers nobody reads."""
    fed = worker.feed.args
    args = fed[0] if fed else tuple(_empty(each, worker.device) for each in layout)
    return tuple(map(graph_input, args))


def _kwargs(worker: StageWorker, *, is_last: bool) -> dict[str, Any]:
    has_own_loss = is_last and own_loss(worker.module, worker.loss_fn) is not None
    return {**worker.feed.kwargs[0], **({"head": False} if has_own_loss else {})}


def _empty(each: TensorLayout | None, device: torch.device) -> Tensor | None:
    if each is None:
        return None
    return torch.empty(each.shape, dtype=each.dtype, device=device, requires_grad=each.requires_grad)


def _outputs(stage: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout | None:
    """The layout of what the module returns; None if Dynamo can't tell it."""
    try:
        return layout_of(tuple(forward.outputs(*args, **kwargs)))
    except RuntimeError as error:  # CaptureError: the class is in a room that takes seconds to import
        _log.info("the stages behind stage %d compile later: %s", stage, error)
        return None

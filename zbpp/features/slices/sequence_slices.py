"""Slices of sequences: what the slices of a microbatch share on a stage.

    F of slice 0    makes the Past of (stage, microbatch)
    F of slice k    runs forward(..., sequence_slice=past.at(k))
    B of slice 0    is the last one that needs the Past: it is dropped. Without B: behind F of the last slice

The core cuts the batch and weighs the losses; it knows units, and not what their forwards share.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from zbpp.autograd.models.past import Past
from zbpp.runtime.call.feed import Call, Feed
from zbpp.runtime.call.results import Result
from zbpp.runtime.extra import Feature
from zbpp.runtime.layout import Message, Run
from zbpp.runtime.rank import Rank
from zbpp.runtime.stage import StageWorker
from zbpp.schedule import Action, Op
from zbpp.schedule.program import Instruction
from zbpp.schedule.slice_bounds import scaled_bounds
from zbpp.schedule.units import Unit
from zbpp.stage_api import takes_slices


class SequenceSlices(Feature):
    """Gives each F of a slice the keys and values of the slices before it; see zbpp/autograd/models/past.py.

    Every pipeline whose timetable has slices has this feature. A stage takes the keyword argument
    `sequence_slice`, or says that it mixes no tokens by the attribute mixes_time = False.
    """

    name = "slices"
    excludes = MappingProxyType(
        {
            "activation_offload": "later slices read what has left; leave it out, and recompute blocks",
            "cuda_graphs": "a graph has the lengths of one slice; leave one of them out",
        }
    )

    def attach(self, rank: Rank) -> None:
        """See Extra. Raises ValueError for a stage or a loss that can't come in slices."""
        self._workers, self._bounds = rank.workers, rank.slice_bounds
        self._pasts: dict[tuple[int, int], Past] = {}  # (stage, microbatch) -> what its slices share
        modules = {stage: worker.module for stage, worker in rank.workers.items()}
        self._takes = {stage for stage, module in modules.items() if takes_slices(module, stage)}
        if rank.timetable.num_stages - 1 in modules and rank.count is None:
            raise ValueError(_UNCOUNTED)

    def around(self, call: str, at: Instruction, run: Run) -> Run:
        """See Extra. The sequences of a `predict` are whole."""
        if not (isinstance(at, Action) and isinstance(at.microbatch, Unit) and at.stage in self._takes):
            return run
        key, index = (at.stage, at.microbatch.microbatch), at.microbatch.slice
        if at.op == Op.F:
            is_last_use = call != "step" and index == at.microbatch.num_slices - 1
            return self._forward(self._workers[at.stage], at, run, is_last_use=is_last_use)
        if at.op == Op.W or index:
            return run

        def last_backward(message: Message) -> Message:
            grads = run(message)
            del self._pasts[key]
            return grads

        return last_backward

    def _forward(self, worker: StageWorker, at: Action, run: Run, *, is_last_use: bool) -> Run:
        unit = at.microbatch
        assert isinstance(unit, Unit)
        key = at.stage, unit.microbatch

        def forward(message: Message) -> Message:
            past = self._pasts.setdefault(key, Past(self._bounds_of(worker.feed, unit.microbatch)))
            worker.keywords["sequence_slice"] = past.at(unit.slice)
            try:
                return run(message)
            finally:
                if is_last_use:
                    del self._pasts[key]

        return forward

    def _bounds_of(self, feed: Feed, microbatch: int) -> Sequence[int]:
        return scaled_bounds(self._bounds, feed.lengths[microbatch]) if feed.lengths else self._bounds

    def end(self, call: Call, result: Result) -> None:
        """See Extra. Raises RuntimeError for a Past that is left over."""
        if self._pasts:
            left = ", ".join(f"({stage},{microbatch})" for stage, microbatch in self._pasts)
            raise RuntimeError(f"a call ended with keys and values left over: {left}")

    def fail(self, error: BaseException) -> None:
        """See Extra."""
        self._pasts.clear()


_UNCOUNTED = (
    "slices of a sequence may differ in the number of targets, and the loss does not say how many it has: "
    "mark it by @zbpp.stage_api.mean_over_tokens, or by @zbpp.stage_api.mean_over(count) with "
    "count(target) -> number of targets, and give it as loss_fn"
)

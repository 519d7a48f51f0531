"""The part of Pipeline that finds where a step's values became NaN or infinite (non_finite.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from zbpp.autograd.leaf_grad import total_of
from zbpp.autograd.python_generators import restored_python_generators
from zbpp.runtime.call import Call
from zbpp.runtime.non_finite import NonFinite, first_of
from zbpp.runtime.non_finite_watcher import Watcher, buffers_seen, parameters_seen
from zbpp.runtime.one_call import OneCall
from zbpp.runtime.pipeline_gradient_release import PipelineGradientRelease
from zbpp.runtime.pipeline_state import PipelineState
from zbpp.runtime.restored import restored_generators
from zbpp.schedule import Timetable

_SHOWN = 3  # buffers in a note


class PipelineNonFinite(PipelineState, PipelineGradientRelease):
    """The part of Pipeline that looks for NaN and infinities."""

    timetable: Timetable
    stages: Mapping[int, nn.Module]
    _one_call: OneCall

    def find_non_finite(
        self, *args: Any, target: Any = None, step: int | None = None, **kwargs: Any
    ) -> NonFinite | None:
        """Run a step's batch again and look at every value: where was the first that is NaN or infinite?

        args, target, kwargs: as given to `step`. step: the step whose random numbers are drawn, counted from
        0; None: the last one. Call this before the weights are updated, or after an update was skipped. The
        answer is the same on every process; None: all values were finite this time. str(answer) is a
        sentence.

        Nothing is trained: weights, buffers, num_steps and the caller's random numbers stay. GRADIENTS ARE
        DROPPED, and a `main_grad` is set to zero. The microbatches run one after the other, with hooks on
        all modules; compiled stages run eager, and are compiled still when it ends. Raises
        ValueError for a pipeline that releases gradients, whose weights have changed. Collective.
        """
        if self.releases_gradients:
            raise ValueError(
                "gradient release has updated the weights in the step, so it can't be run again: load the "
                "weights of an earlier step, and run it without release_gradients"
            )
        self.settle()
        self.meet("find_non_finite")
        self._begins_again = False  # all ranks have settled
        found = first_of(self._gathered(parameters_seen(self.stages)))
        if found is not None:
            self._drop_gradients()
            return found
        held = buffers_seen(self.stages)  # before the step
        args, target, kwargs = tree_map(_detached, (args, target, kwargs))
        part = self.place.data_part if self.place.num_data_parts > 1 else None
        watcher = Watcher(self.stages, self.timetable.num_stages, part)
        self._drop_gradients()
        try:
            with (
                self._one_call,
                restored_generators(self.device),
                restored_python_generators(),
                watcher.watching(),
            ):
                call = Call(args, target, kwargs, loss_scale=self.loss_scale)
                seeds = self._seeds(self.num_steps - 1 if step is None else step)
                self._engine.replay(call, seeds, watcher.methods)
            watcher.look_at_sums()
        finally:
            self._drop_gradients()
        found = first_of(self._gathered(watcher.seen))
        buffers = dict.fromkeys(self._gathered(held))  # replicas say the same
        if found is None or not buffers:
            return found
        return replace(found, note="; ".join(filter(None, [found.note, *list(buffers)[:_SHOWN]])))

    def _gathered(self, seen: list[Any]) -> list[Any]:
        return [each for some in self.place.gather(seen) for each in some]

    def _drop_gradients(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None
            main_grad = total_of(parameter)
            if main_grad is not None:
                main_grad.zero_()


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value

"""The part of Pipeline that runs forward alone, between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zbpp.runtime.call import Call
from zbpp.runtime.named_losses import NamedLosses
from zbpp.runtime.one_call import OneCall
from zbpp.runtime.outputs import Metrics, Outputs
from zbpp.runtime.pipeline_state import PipelineState
from zbpp.runtime.restored import eval_mode, restored_generators


class PipelineEvaluation(PipelineState):
    """The part of Pipeline that runs forward alone."""

    stages: Mapping[int, nn.Module]
    evaluation_losses: NamedLosses
    _loss_fn: Any
    _one_call: OneCall

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> Any:
        """The forward of one batch in eval mode, without gradients; shapes may differ from step's.

        Returns losses as `step` does; (losses, outputs) with return_outputs, (losses, metrics) with metrics,
        (losses, outputs, metrics) with both. With either of them the target may be left out: a loss_fn then
        gives no losses, and metrics gets None as the target.
        outputs: what the last stage returned, microbatches concatenated along dim 0; None on other ranks.
        metrics(output, target) -> {name: number}, called per microbatch; the means over all rows, {} on other
        ranks.
        """
        self.settle()
        seen = Outputs(is_kept=return_outputs, metrics=metrics) if return_outputs or metrics else None
        with self._evaluating():
            call = Call(args, target, kwargs, seen.take if seen else None)
            losses, self.evaluation_losses = self._engine.evaluate(call, self._seeds())
        self._begins_again = False  # all ranks have settled
        if seen is None:
            return losses
        found: list[Any] = [losses]
        if return_outputs:
            found.append(seen.concatenated())
        if metrics:
            found.append(seen.metrics())
        return tuple(found)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """The last stage's output for a batch of any size, which is one microbatch; None on other ranks.

        As in `evaluate`: in eval mode, without gradients, at any time between steps. No loss is computed.
        """
        self.settle()
        seen = Outputs(is_kept=True, metrics=None)
        with self._evaluating():
            call = Call(args, None, kwargs, seen.take)
            self._engine.predict(call, self._seeds())
        return seen.concatenated()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """One call, in eval mode and without gradients; the caller's random numbers stay."""
        evaluated = [*self.stages.values(), self._loss_fn]
        with self._one_call, restored_generators(self.device), eval_mode(evaluated), torch.no_grad():
            yield

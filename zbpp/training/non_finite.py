"""What happens when the loss, an auxiliary loss or the norm of the gradients of a step is NaN or infinite.

All ranks judge the same Outcome, so they decide alike, without a message of their own.

    skip       weights and optimizer states stay, as for a loss scale's overflow; after ten such
               steps in a row the run stops, since a parameter that is NaN never heals
    stop       the run stops at once, before the update
    continue   the update is made, as in a loop of plain torch

With a loss scale (float16), gradients that overflow are ordinary: the scale skips them, whatever the policy,
and they do not count. A loss that is not finite does count.

To say where the first such value appeared, the step is run again (zbpp.find_non_finite), which takes a
few steps' time: this is done at the first such step, then at most once in 100 steps, and when the run stops.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from zbpp.observers.non_finite import NonFinite, find_non_finite
from zbpp.runtime import Pipeline
from zbpp.training.batches import Batch
from zbpp.training.optim.update import Metrics, Outcome, with_named_losses

POLICIES = ("skip", "stop", "continue")
_MOST_SKIPPED = 10  # in a row
_GOES_ON = "resume=auto begins again after the newest checkpoint, if there is one, with the same data"
_BETWEEN_SEARCHES = 100  # steps


class NonFiniteError(RuntimeError):
    """The loss or the gradients are NaN or infinite, and the run's policy says to stop."""


def text_of(number: float) -> str:
    """A number that is not finite, as JavaScript writes it."""
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def fault_of(outcome: Outcome, *, is_scaled: bool) -> str:
    """What is not finite in a step: `the loss is NaN`; "" if nothing is. is_scaled: with a loss scale."""
    if not math.isfinite(outcome.loss):
        return f"the loss is {text_of(outcome.loss)}"
    for name, value in outcome.named.items():
        if not math.isfinite(value):
            return f"the loss {name!r} is {text_of(value)}"
    if not math.isfinite(outcome.norm) and not is_scaled:
        return f"the norm of the gradients is {text_of(outcome.norm)}"
    return ""


class Values:
    """Judges the outcome of each step. policy: one of POLICIES.

    is_scaled: whether a loss scale skips overflows. has_updated: whether the step itself updates the weights
    (gradient release), so that no update can be skipped. is_shown: whether this rank prints.
    error: why the run has to stop; None while it may go on. num_skipped: steps without an update, those of a
    loss scale included. num_non_finite: steps with a fault.
    """

    def __init__(
        self,
        policy: str,
        *,
        is_scaled: bool,
        has_updated: bool,
        is_shown: bool,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"non_finite={policy!r}: write one of {', '.join(POLICIES)}")
        self._policy, self._is_scaled = policy, is_scaled
        self._has_updated, self._is_shown = has_updated, is_shown
        self.error: NonFiniteError | None = None
        self.num_skipped = self.num_non_finite = 0
        self._in_a_row = 0  # steps with a fault
        self._searched: int | None = None  # the last step that was run again

    def skips(self, outcome: Outcome) -> bool:
        """Whether a step's update is left out."""
        if self._is_scaled and not math.isfinite(outcome.norm):
            return True
        return self._policy != "continue" and bool(fault_of(outcome, is_scaled=self._is_scaled))

    def judge(self, outcome: Outcome, metrics: Metrics, find: Callable[[], Any]) -> None:
        """Count a step, and set `error` if the run has to stop.

        find: runs the step again, and says where a value was not finite first; None if all were finite.
        """
        self.num_skipped += bool(metrics["skipped"])
        fault = fault_of(outcome, is_scaled=self._is_scaled)
        if not fault:
            if math.isfinite(outcome.norm):  # an overflow that the loss scale skips resets no count
                self._in_a_row = 0
            return
        self.num_non_finite += 1
        self._in_a_row += 1
        why = self._why_to_stop()
        place = self._place(metrics["step"], find) if self._is_search_due(metrics["step"], why) else ""
        text = f"step {metrics['step']}: {fault}"
        if why:
            self.error = NonFiniteError(". ".join(filter(None, [text, place, why])))
        elif self._is_shown and place:
            done = "its update is skipped" if metrics["skipped"] else "the weights are updated all the same"
            print(f"NOT FINITE: {text}; {done}. {place}", flush=True)

    def _why_to_stop(self) -> str:
        """Why the run has to stop; "" if it goes on."""
        if self._policy == "continue":
            return ""
        if self._has_updated:
            return (
                "memory.gradient_release has updated the weights with it, so the step can't be skipped: "
                f"{_GOES_ON}; memory.gradient_release=off finds the place"
            )
        if self._policy == "stop":
            return f"The run stops (non_finite=stop); {_GOES_ON}, and non_finite=skip leaves such a step out"
        if self._in_a_row >= _MOST_SKIPPED:
            return f"The run stops: {_MOST_SKIPPED} steps in a row were skipped; {_GOES_ON}"
        return ""

    def _is_search_due(self, step: int, why: str) -> bool:
        return bool(why) or self._searched is None or step - self._searched >= _BETWEEN_SEARCHES

    def _place(self, step: int, find: Callable[[], Any]) -> str:
        """A sentence about where the fault came from."""
        self._searched = step
        if self._has_updated:
            return ""
        if self._policy == "continue":
            return "Its place is not searched, since the weights have changed: non_finite=stop finds it"
        found = find()
        if found is not None:
            return str(found)
        return (
            "The step was run again, without compilation, and every value was finite: a device or its memory "
            "may be faulty, or a result depends on something other than weights, data and random numbers, "
            "such as compilation"
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        return {"counts": [self.num_skipped, self.num_non_finite, self._in_a_row]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` (older ones also count loss spikes)."""
        skipped, non_finite, *_, in_a_row = map(int, state["counts"])
        self.num_skipped, self.num_non_finite, self._in_a_row = skipped, non_finite, in_a_row


# ----------------------------------------------------------------
# Steps whose outcome is not known yet. With post-validation an outcome is known one step later.


class _Begun(NamedTuple):
    """step: counted from 1. batch: to run the step again. number: the pipeline's, counted from 0."""

    step: int
    times: Metrics
    batch: Batch
    number: int


class BegunSteps:
    """Turns the outcomes of steps, oldest first, into metrics. values: judges the outcomes."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._begun: deque[_Begun] = deque()

    def add(self, step: int, times: Metrics, batch: Batch, pipeline: Pipeline) -> None:
        """Note the step (counted from 0) that the pipeline has just run. times: its duration and speed."""
        self._begun.append(_Begun(step + 1, times, batch, pipeline.num_steps - 1))

    def finish(self, outcome: Outcome, figures: Metrics, pipeline: Pipeline) -> Metrics:
        """The metrics of the oldest step, whose outcome has become known."""
        begun = self._begun.popleft()
        metrics = {"step": begun.step, "loss": outcome.loss, **figures, **begun.times}
        metrics = with_named_losses(metrics, outcome.named)
        self._values.judge(outcome, metrics, partial(self._find_non_finite, begun, pipeline))
        return metrics

    def _find_non_finite(self, begun: _Begun, pipeline: Pipeline) -> NonFinite | None:
        """Run a step again. With post-validation the weights may have the next step's update already."""
        args, target = begun.batch
        return find_non_finite(pipeline, *args, target=target, step=begun.number)

"""Post-validation: at its gate, a step waits until the last update of the weights is validated.

See zbpp.PostValidation, which gives pipelines such updates, and gate.py. If the update was
wrong, the step begins again: Rank.run drops its messages and its F's, and runs it from its beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

from zbpp.error_text import error_text
from zbpp.features.post_validation.gate import PassGate, gate_of, with_gate
from zbpp.features.post_validation.posts import Posts
from zbpp.job.agreement import refuse_together
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.results import Result
from zbpp.runtime.executor import BeginAgain
from zbpp.runtime.extra import Feature, Handler
from zbpp.runtime.pipeline import Pipeline
from zbpp.runtime.rank import Rank
from zbpp.runtime.restored import Buffers, InPlaceChanges
from zbpp.schedule import Program


class PendingUpdate(Protocol):
    """An update of the weights that is not validated yet: see Validation.pending."""

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step, after `validate`."""

    def validate(self) -> bool:
        """Wait until all ranks know whether the update was right; redo it if not. Returns whether it was."""

    def zero_grad(self) -> None:
        """Drop the gradients of the update, after `validate`: the next step sums its own from now on."""


class Validation(Feature):
    """The validation of one pipeline's updates.

    pending: the update that is not validated yet; None: none. posts: through which ranks exchange the norms
    of their gradients. has_changed_inputs: whether a stage of this rank has changed a step's inputs in place.
    """

    name = "post_validation"
    excludes = MappingProxyType(
        {
            "gradient_release": "gradient release drops the gradients that post-validation may need again: "
            "leave one of them out",
            "weight_offload": "the weights' copies on the device would not be taken back: leave one of them "
            "out",
            "empty_microbatches": "its gate belongs to one timetable: leave it out",
        }
    )

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._rank, self.posts = rank, Posts(rank.place, rank.timeout)
        self._gate = gate_of(rank.programs, rank.index)
        self._buffers, self._inputs = Buffers(rank.modules), InPlaceChanges(())
        self.pending: PendingUpdate | None = None
        self.has_changed_inputs, self._name_of_step = False, ""
        # Whether an update was redone outside of a step. Another rank may learn of it only at the gate of its
        # next step, which then begins again. So this rank's next step has to begin again, too.
        self._begins_again = False

    # ---- A step

    def take(self, call: Call) -> Call:
        """See Feature."""
        return call._replace(name=self._name_of_step) if call.kind == "step" else call

    def rewrite(self, call: str, program: Program) -> Program:
        """See Feature."""
        return with_gate(program, self._gate) if call == "step" else program

    def handlers(self, call: str) -> Mapping[type, Handler]:
        """See Feature."""
        return {PassGate: self._pass_gate}

    def begin(self, call: Call) -> None:
        """Note the step's inputs: a step that changes them in place could not begin again with them."""
        if call.kind == "step" and (self.pending is not None or self._begins_again):
            self._buffers.keep()
        feeds = [worker.feed for worker in self._rank.workers.values()]
        frozen = [each for each in self._rank.trained() if not each.requires_grad]
        self._inputs = InPlaceChanges([[(each.args, each.kwargs, each.targets) for each in feeds], frozen])

    def end(self, call: Call, result: Result) -> None:
        """Note whether the inputs were changed. Each rank has validated its update before an evaluation."""
        self.has_changed_inputs |= self._inputs.are_found()
        self._inputs = InPlaceChanges(())
        if call.kind != "step":
            self._begins_again = False

    def fail(self, error: BaseException) -> None:
        """Give a step that begins again the buffers from before the step."""
        self._inputs = InPlaceChanges(())
        if isinstance(error, BeginAgain):
            self._buffers.restore()

    def close(self) -> None:
        """Let the processes that wait for a value of this one stop waiting."""
        if self._rank.over:
            with suppress(RuntimeError):  # the store may be gone, too
                self.posts.give_up(self._rank.over)

    def _pass_gate(self, at: PassGate) -> None:
        """Validate the pending update. Raises BeginAgain if it was wrong: F's have used wrong weights."""
        update = self.pending
        if update is not None:
            was_right = self._validated(update)
            update.zero_grad()
            if not was_right:
                raise BeginAgain(update.loss_scale)
        elif self._begins_again:
            self._begins_again = False
            raise BeginAgain()

    # ---- Between steps

    def finish_update(self) -> None:
        """Validate the pending update, if there is one; afterwards the weights are final."""
        if self.pending is not None:
            self._begins_again = not self._validated(self.pending)

    def give_up(self, why: str) -> None:
        """End the pipeline, since its weights belong to no step."""
        self._rank.lost = f"{why}; load weights and optimizer states of an earlier step"
        self.pending = None
        self._rank.end(self._rank.lost)

    def set_name_of_step(self, name: str) -> None:
        """Name the next steps. Ranks compare names, and refuse a step that some run without an update."""
        self._name_of_step = name

    def _validated(self, update: PendingUpdate) -> bool:
        self.pending = None
        try:
            return update.validate()
        except BaseException as error:
            self.give_up(f"an update could not be validated ({error_text(error)}), and may be wrong")
            raise


def validation_of(pipeline: Pipeline) -> Validation:
    """The pipeline's validation. The first call is collective, and raises ValueError on all ranks or none."""
    found = next((each for each in pipeline.extras if isinstance(each, Validation)), None)
    if found is None:
        found = Validation()
        refuse_together(pipeline.refusal(found), pipeline.place.gather)
        pipeline.use(found)
    return found

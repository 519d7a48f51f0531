"""The part of Pipeline for post-validation: at its gate, a step waits until the last update is validated.

See zbpp.PostValidation, which gives pipelines such updates, and zbpp/schedule/gate.py.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from zbpp.error_text import error_text
from zbpp.runtime.call import Call
from zbpp.runtime.engine import Settle
from zbpp.runtime.mesh import Place
from zbpp.runtime.pipeline_end import PipelineEnd
from zbpp.runtime.posts import Posts


class PendingUpdate(Protocol):
    """An update of the weights that is not validated yet: see Pipeline.pending_update."""

    def validate(self) -> bool:
        """Wait until all ranks know whether the update was right; redo it if not. Returns whether it was."""

    def zero_grad(self) -> None:
        """Drop the gradients of the update, after `validate`: the next step sums its own from now on."""


class PipelineValidation(PipelineEnd):
    """The part of Pipeline for post-validation.

    pending_update: the update that is not validated yet; None: none.
    """

    place: Place
    loss_scale: float
    pending_update: PendingUpdate | None = None
    step_kind = "step"  # ranks compare the kinds of their calls: one without an update would be waited for
    _timeout: float
    _lost_update = ""  # why the weights belong to no step, if an update failed
    # Whether an update was redone outside of a step. Another rank may learn of it only at the gate of its
    # next step, which then begins again. So this rank's next step has to begin again, too.
    _begins_again = False

    def settle(self) -> None:
        """Validate the last update, if it is not validated yet; afterwards the weights are final.

        Raises RuntimeError if an update has failed: the weights may then be wrong for good.
        """
        if self._lost_update:
            raise RuntimeError(self._lost_update)
        if self.pending_update is not None:
            self._begins_again = not self._validated(self.pending_update)

    def _settle_in_step(self, call: Call) -> Settle | None:
        """What the step of this call does at its gate; None: it has no gate."""
        if self.pending_update is not None:
            return partial(self._pass_gate, self.pending_update, call)
        if self._begins_again:
            return partial(self._repeat, call)
        return None

    def _repeat(self, call: Call) -> Call:
        self._begins_again = False
        return call

    def _pass_gate(self, update: PendingUpdate, call: Call) -> Call | None:
        """Validate an update at the gate of a step. Returns the call of the step if it has to begin again."""
        was_right = self._validated(update)
        update.zero_grad()
        return None if was_right else call._replace(loss_scale=self.loss_scale)

    def _validated(self, update: PendingUpdate) -> bool:
        self.pending_update = None
        try:
            return update.validate()
        except BaseException as error:
            self.give_up(f"an update could not be validated ({error_text(error)}), and may be wrong")
            raise

    def give_up(self, why: str) -> None:
        """End this pipeline, since its weights belong to no step."""
        self._lost_update = (
            f"{why}: load weights and optimizer states of an earlier step, and make a new Pipeline"
        )
        self.pending_update = None
        self._end(why)

    def posts(self) -> Posts:
        """The Posts by which ranks share the norms of their gradients. The first call is collective.

        After the first call, each step finds out whether a stage changes its inputs in place
        (`has_changed_inputs`).
        """
        if self._engine.posts is None:
            self._engine.posts = Posts(self.place, self._timeout)
        return self._engine.posts

    @property
    def gate_refusal(self) -> str:
        """Why no step of this rank can have a gate; "" if steps can."""
        return self._engine.gate_refusal

    @property
    def has_changed_inputs(self) -> bool:
        """Whether a stage of this rank changes a step's inputs in place; False until `posts` is called."""
        return self._engine.has_changed_inputs

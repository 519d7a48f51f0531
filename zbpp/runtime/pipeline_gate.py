"""An update of the weights that a step waits for at its gate; what follows if it is lost.

See zbpp.PostValidation, which gives pipelines such updates, and zbpp/schedule/gate.py.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from zbpp.runtime.engine import Settle, error_text
from zbpp.runtime.feed import Call
from zbpp.runtime.mesh import Place
from zbpp.runtime.pipeline_end import PipelineEnd
from zbpp.runtime.posts import Posts


class Gate(Protocol):
    """An update of the weights that is not known to be right yet: see Pipeline.gate."""

    def validate(self) -> bool:
        """Wait until it is known, and make the weights right. Returns whether they were right."""

    def open(self) -> None:
        """Drop the gradients of the update: the next step adds its own from now on."""


class PipelineGate(PipelineEnd):
    """The part of Pipeline that has to do with its gate."""

    place: Place
    loss_scale: float
    gate: Gate | None = None
    _timeout: float
    _lost_update = ""  # why the weights are those of no step
    # An update was done again outside of a step. Other ranks may learn so at their gates only, where their
    # step begins again: then this rank's has to, too.
    _begins_again = False

    def settle(self) -> None:
        """Wait for an update that is not known to be right yet; afterwards the weights are.

        Raises RuntimeError if that failed before: the weights may be wrong for good.
        """
        if self._lost_update:
            raise RuntimeError(self._lost_update)
        if self.gate is not None:
            self._begins_again = not self._validated(self.gate)

    def _settle_in_step(self, call: Call) -> Settle | None:
        """What the step of this call does at its gate; None: it has no gate."""
        if self.gate is not None:
            return partial(self._pass_gate, self.gate, call)
        if self._begins_again:
            return partial(self._repeat, call)
        return None

    def _repeat(self, call: Call) -> Call:
        self._begins_again = False
        return call

    def _pass_gate(self, gate: Gate, call: Call) -> Call | None:
        """Settle an update at the gate of a step. Returns the step's new call, if it has to begin again."""
        was_right = self._validated(gate)
        gate.open()
        return None if was_right else call._replace(loss_scale=self.loss_scale)

    def _validated(self, gate: Gate) -> bool:
        self.gate = None
        try:
            return gate.validate()
        except BaseException as error:
            self.give_up(f"an update could not be validated ({error_text(error)}), and may be wrong")
            raise

    def give_up(self, why: str) -> None:
        """End this pipeline, whose weights are not those of any step."""
        self._lost_update = (
            f"{why}: load weights and optimizer states of an earlier step, and make a new Pipeline"
        )
        self.gate = None
        self._end(why)

    def posts(self) -> Posts:
        """What the ranks post about updates that later steps have a gate for. The first call is collective.

        From then on each step notes whether a stage changes its inputs in place (`has_changed_inputs`).
        """
        if self._engine.posts is None:
            self._engine.posts = Posts(self.place, self._timeout)
        return self._engine.posts

    @property
    def gate_refusal(self) -> str:
        """Why no step of this rank can have a gate, or nothing."""
        return self._engine.gate_refusal

    @property
    def has_changed_inputs(self) -> bool:
        """Whether a stage of this rank has changed what a step was given; False until `posts` is called."""
        return self._engine.has_changed_inputs

"""Post-validation: at its gate, a step waits until the last update of the weights is validated.

See zbpp.PostValidation, which gives pipelines such updates, and zbpp/schedule/gate.py. How a step begins
again is in Rank.run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Protocol

from zbpp.error_text import error_text
from zbpp.runtime.call import Call, Result
from zbpp.runtime.extra import Feature
from zbpp.runtime.rank import Rank, Settle
from zbpp.runtime.restored import InPlaceChanges
from zbpp.runtime.update.posts import Posts


class PendingUpdate(Protocol):
    """An update of the weights that is not validated yet: see Validation.pending."""

    def validate(self) -> bool:
        """Wait until all ranks know whether the update was right; redo it if not. Returns whether it was."""

    def zero_grad(self) -> None:
        """Drop the gradients of the update, after `validate`: the next step sums its own from now on."""


class Validation(Feature):
    """The validation of one pipeline's updates; an extra of the pipeline from the first `posts` on.

    loss_scale: returns the pipeline's.

    pending: the update that is not validated yet; None: none. name_of_step: ranks compare the names of their
    calls, since a step without an update would be waited for. has_changed_inputs: whether a stage of this
    rank changes a step's inputs in place; False until `posts` is called.
    """

    name = "post_validation"
    excludes = MappingProxyType(
        {
            "gradient_release": "gradient release drops the gradients that post-validation may need again: "
            "leave one of them out",
            "weight_offload": "the weights' copies on the device would not be taken back: leave one of them "
            "out",
        }
    )

    def __init__(self, rank: Rank, loss_scale: Callable[[], float]) -> None:
        self._rank, self._loss_scale = rank, loss_scale
        self.pending: PendingUpdate | None = None
        self.name_of_step, self.has_changed_inputs = "step", False
        self._posts: Posts | None = None
        self._inputs = InPlaceChanges(())
        self._lost_update = ""  # why the weights belong to no step, if an update failed
        # Whether an update was redone outside of a step. Another rank may learn of it only at the gate of its
        # next step, which then begins again. So this rank's next step has to begin again, too.
        self._begins_again = False

    # ---- Calls

    def settle(self) -> None:
        """Validate the pending update, if there is one; afterwards the weights are final.

        Raises RuntimeError if an update has failed: the weights may then be wrong for good.
        """
        if self._lost_update:
            raise RuntimeError(self._lost_update)
        if self.pending is not None:
            self._begins_again = not self._validated(self.pending)

    def all_have_settled(self) -> None:
        """Called after a call that no rank makes before its update is validated."""
        self._begins_again = False

    def in_step(self, call: Call) -> Settle | None:
        """What the step of this call does at its gate; None: it has no gate."""
        if self.pending is not None:
            return partial(self._pass_gate, self.pending, call)
        return partial(self._repeat, call) if self._begins_again else None

    def give_up(self, why: str) -> None:
        """End the pipeline, since its weights belong to no step."""
        self._lost_update = (
            f"{why}: load weights and optimizer states of an earlier step, and make a new Pipeline"
        )
        self.pending = None
        self._rank.end(why)

    def _repeat(self, call: Call) -> Call:
        self._begins_again = False
        return call

    def _pass_gate(self, update: PendingUpdate, call: Call) -> Call | None:
        """Validate an update at the gate of a step. Returns the call of the step if it has to begin again."""
        was_right = self._validated(update)
        update.zero_grad()
        return None if was_right else call._replace(loss_scale=self._loss_scale())

    def _validated(self, update: PendingUpdate) -> bool:
        self.pending = None
        try:
            return update.validate()
        except BaseException as error:
            self.give_up(f"an update could not be validated ({error_text(error)}), and may be wrong")
            raise

    # ---- What ranks tell each other

    @property
    def refusal(self) -> str:
        """Why no step of this rank can have a gate; "" if steps can."""
        try:
            self._rank.extras.check(self)
        except ValueError as error:
            return str(error)
        return ""

    def posts(self) -> Posts:
        """The Posts by which ranks share the norms of their gradients. The first call is collective."""
        if self._posts is None:
            self._rank.use(self)
        assert self._posts is not None
        return self._posts

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._posts = Posts(rank.place, rank.timeout)

    def begin(self, call: Call) -> None:
        """A step that changes, in place, what it was given from outside could not begin again."""
        feeds = [worker.feed for worker in self._rank.workers.values()]
        frozen = [each for each in self._rank.trained() if not each.requires_grad]
        self._inputs = InPlaceChanges([[(each.args, each.kwargs, each.targets) for each in feeds], frozen])

    def end(self, call: Call, result: Result) -> None:
        """See Extra."""
        self.has_changed_inputs |= self._inputs.are_found()
        self._inputs = InPlaceChanges(())

    def fail(self, error: BaseException) -> None:
        """See Extra."""
        self._inputs = InPlaceChanges(())

    def close(self) -> None:
        """Let the processes that wait for a value of this one stop waiting."""
        if self._posts is not None:
            with suppress(RuntimeError):  # the store may be gone, too
                self._posts.give_up(self._rank.over)

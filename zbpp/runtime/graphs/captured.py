"""The graphs of one layout of calls, with what they read, write and rely on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from zbpp.runtime.feed import Call
from zbpp.runtime.graphs.actions import ActionGraphs
from zbpp.runtime.graphs.attributes import marks
from zbpp.runtime.graphs.call import StaticCall
from zbpp.runtime.graphs.gradients import StaticGradients
from zbpp.runtime.graphs.losses import StaticLosses
from zbpp.runtime.graphs.program import ProgramGraph
from zbpp.runtime.graphs.relied_on import Basis, changed_attribute


class Captured:
    """The graphs of one layout. basis, loss: what they rely on; loss: the loss function, None for none."""

    def __init__(
        self,
        basis: Basis,
        call: StaticCall,
        gradients: StaticGradients,
        losses: Mapping[int, StaticLosses],
        graphs: ActionGraphs | ProgramGraph,
        loss: Any,
    ) -> None:
        self._loss, self._attributes = loss, marks(basis.modules, loss)
        self._basis, self._call, self._gradients, self.graphs = basis, call, gradients, graphs
        self._losses = losses

    def fits(self, basis: Basis) -> bool:
        """Whether a replay does what an eager step on this basis would do.

        Forward may put other objects into attributes, so they are compared from the end of a capture on.
        """
        return basis == self._basis and _is_equal(marks(basis.modules, self._loss), self._attributes)

    def changed(self, basis: Basis) -> str:
        """What has changed since the capture."""
        if basis != self._basis:
            return basis.changed(self._basis)
        return changed_attribute(basis.modules, self._attributes, marks(basis.modules, self._loss))

    def begin(self, call: Call) -> None:
        """Load a call. Raises NotCapturable, and changes nothing, where a `.grad` is of another kind."""
        self._gradients.begin()
        self._call.load(call)
        for each in self._losses.values():
            each.begin()

    def end(self) -> None:
        """The step has run: give the workers its losses."""
        for each in self._losses.values():
            each.give()


def _is_equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    with suppress(Exception):  # a comparison of a user's values may raise
        return bool(one == other)
    return False

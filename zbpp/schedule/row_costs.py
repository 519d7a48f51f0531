"""What the actions of a row cost, as arrays: the costs of their stages for their microbatches' lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from zbpp.schedule.costs import StageCosts
from zbpp.schedule.dataflow_arrays import kinds_of
from zbpp.schedule.timetable import Op, Row

Floats = npt.NDArray[np.float64]


class RowCosts:
    """The arrays over all stages, made once: a rank alone would take as long for them as there are stages."""

    def __init__(self, costs: StageCosts) -> None:
        self._durations, self._delays = by_kind(costs.duration), np.array(costs.comm)
        self._exchange = np.array(costs.exchange)
        self._quadratic = by_kind(costs.quadratic) if costs.quadratic else None
        self._lengths = np.array(costs.lengths) if costs.lengths else None
        self.has_exchange = any(costs.exchange)

    def durations(self, row: Row) -> Floats:
        """How long (ms) each action takes, of a W that runs in no exchange."""
        kinds = kinds_of(row)
        if self._lengths is None:
            return self._durations[kinds]
        lengths = self._lengths[row.microbatches]
        linear: Floats = self._durations[kinds] * lengths
        return linear if self._quadratic is None else linear + self._quadratic[kinds] * lengths**2

    def delays(self, row: Row) -> Floats:
        """How long (ms) a message that each action's stage sends for its microbatch takes."""
        return self._scaled(self._delays, row)

    def exchange(self, row: Row) -> Floats:
        """How long (ms) tokens are exchanged inside each F, B and BW; for a W, inside its stage's F."""
        return self._scaled(self._exchange, row)

    def _scaled(self, by_stage: Floats, row: Row) -> Floats:
        own = by_stage[row.stages]
        return own if self._lengths is None else own * self._lengths[row.microbatches]


def by_kind(per_stage: Mapping[Op, Sequence[float]]) -> Floats:
    """The numbers of each op on each stage as one array, by `kinds_of`."""
    numbers: Floats = np.array([per_stage[op] for op in Op]).T.ravel()
    return numbers

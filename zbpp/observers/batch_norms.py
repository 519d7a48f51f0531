"""Does a BatchNorm see microbatches of different sizes in a step?"""

from __future__ import annotations

from zbpp.runtime.call.feed import Call
from zbpp.runtime.extra import Observer
from zbpp.runtime.rank import Rank
from zbpp.stage_api import batch_norms

_DIFFERENT_SIZES = (
    "a stage has a BatchNorm in training mode, and the microbatches of this step have different sizes: its "
    "statistics would weigh each microbatch the same, and a token of a long one less. Use LayerNorm or "
    "GroupNorm, or put the BatchNorm into eval mode"
)


class BatchNorms(Observer):
    """Raises ValueError for a step with such microbatches, if a BatchNorm is in training mode."""

    name = "batch_norms"

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._norms = [each for worker in rank.workers.values() for each in batch_norms(worker.module)]
        self._executors = rank.executors

    def begin(self, call: Call) -> None:
        """See Extra."""
        if call.kind != "step" or not any(each.training for each in self._norms):
            return
        if len({*self._executors[call.kind].sizes}) > 1:
            raise ValueError(_DIFFERENT_SIZES)

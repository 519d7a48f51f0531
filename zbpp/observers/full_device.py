"""Warns when the allocator had to give memory back to a full device in the middle of a step.

torch then frees the blocks that it keeps for later and tries again. The step goes on, and is slow. On NCCL
there is a danger besides: without expandable segments freeing waits for the whole device, receives of other
ranks included, and if these wait for this rank, the job hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from zbpp.devices import num_allocation_retries
from zbpp.runtime.call.feed import Call
from zbpp.runtime.call.results import Result
from zbpp.runtime.extra import Observer
from zbpp.runtime.rank import Rank

_log = logging.getLogger(__name__)


class FullDevice(Observer):
    """Warns once, after the first such call. count: how often the allocator has tried again so far."""

    name = "full_device"

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        self._count, self._has_warned = count, False

    def attach(self, rank: Rank) -> None:
        """See Extra."""
        self._rank = rank
        self._num_retries = self._count or partial(num_allocation_retries, rank.device)

    def begin(self, call: Call) -> None:
        """See Extra."""
        if not self._has_warned:
            self._before = self._num_retries()

    def end(self, call: Call, result: Result) -> None:
        """See Extra."""
        if self._has_warned or self._num_retries() == self._before:
            return
        self._has_warned = True
        _log.warning(
            "rank %d: the device was full in %s after step %d, and the allocator gave memory back to it, "
            "which is slow, and on NCCL may hang: take smaller microbatches, memory.recompute=block or a "
            "schedule that holds less (zbpp memory shows what each would save)",
            self._rank.index,
            call.kind,
            self._rank.num_steps,
        )

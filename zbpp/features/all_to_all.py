"""Rows exchanged among the processes of a group, for experts and for attention over divided sequences."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from zbpp.job.errors import communicating


class AllToAll:
    """A Transfer (see exchange.py) over a process group. what: whose rows, for error messages."""

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group, self._what = group, f"exchanging rows of {what}"

    def __call__(self, rows: Tensor, send_counts: list[int], receive_counts: list[int]) -> Received:
        received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        with communicating(self._what):
            work = dist.all_to_all_single(
                received, rows, receive_counts, send_counts, group=self._group, async_op=True
            )
        return Received(received, rows, work, self._what)


class Received:
    """A Pending: rows that are being received; keeps those that are sent."""

    def __init__(self, received: Tensor, sent: Tensor, work: dist.Work, what: str) -> None:
        self._received, self._sent, self._work, self._what = received, sent, work, what

    def is_done(self) -> bool:
        """See Pending."""
        return self._work.is_completed()

    def wait(self) -> Tensor:
        """See Pending."""
        with communicating(self._what):
            self._work.wait()
        return self._received

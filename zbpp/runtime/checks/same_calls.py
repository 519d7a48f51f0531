"""Whether the ranks of a pipeline call `step` and `evaluate` in the same order, with batches of one size.

    rank 0   evaluate()  step()
    rank 1   step()      evaluate()    without this check: trains on the evaluation batch

Calls are numbered. Before a rank sends or receives anything in a call, it writes into the job's store which
call it makes, then reads what its neighbours wrote: ranks that it has a link with. Of two neighbours, the one
that reads last reads after both have written: that rank sees a difference, sends nothing, and raises. A check
of tags would not do, since NCCL ignores them. The check through the store costs one write per call and one
read per neighbour and call, and nothing per message.

On CUDA a step returns before its messages have arrived, so a rank may be several calls ahead of its
neighbour. One entry covers a run of equal calls: kind, first and last number. Before the first call of
another kind replaces the entry, the rank waits for its device: by then its neighbours have made all earlier
calls.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

import torch

from zbpp.job.agreement import AgreementError
from zbpp.job.errors import CommunicationError, communicating
from zbpp.runtime.call import Call
from zbpp.runtime.extra import Observer
from zbpp.runtime.groups import Store, job_store
from zbpp.runtime.rank import Rank


class _Announced(NamedTuple):
    """A rank's current call, as the rank writes the call into the store."""

    number: int
    first: int  # the number of the first of the consecutive calls of this kind
    kind: str
    rows: int | None  # of the batch; None if this rank was given no part of it


class CallOrder:
    """The calls of one rank. store: shared by the ranks; neighbours: whose calls must be the same."""

    def __init__(self, store: Store, rank: int, neighbours: Collection[int], device: torch.device) -> None:
        self._store, self._rank, self._neighbours, self._device = store, rank, sorted(neighbours), device
        self._current = _Announced(-1, -1, "nothing", None)
        self._write()

    def begin(self, kind: str, rows: int | None) -> None:
        """Announce the next call. Raises AgreementError if a neighbour's call of this number is another."""
        number, first, previous, _ = self._current
        if kind != previous:
            first = number + 1
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        self._current = _Announced(number + 1, first, kind, rows)
        self._write()
        self.check()

    def check(self) -> None:
        """Raise AgreementError if a neighbour is known to make another call than this rank's current one."""
        mine = self._current
        for rank in self._neighbours:
            with communicating(f"rank {self._rank}, looking up the call of rank {rank}"):
                number, first, kind, rows = self._store.get(str(rank)).decode().split()
            # If the neighbour is not yet at this call, it compares when it gets there.
            if int(number) >= mine.number >= int(first) and kind != mine.kind:
                raise AgreementError(
                    f"rank {rank} is in {kind}() while rank {self._rank} is in {mine.kind}(): every rank "
                    "must make the same calls of a pipeline in the same order"
                )
            if int(number) == mine.number and mine.rows is not None and rows not in ("None", str(mine.rows)):
                raise AgreementError(
                    f"{mine.kind}() got {mine.rows} rows on rank {self._rank} and {rows} on rank {rank}: "
                    "give inputs and targets of one batch"
                )

    def _write(self) -> None:
        self._store.set(str(self._rank), " ".join(map(str, self._current)))


class SameCalls(Observer):
    """Raises AgreementError where linked ranks make different calls."""

    name = "same_calls"

    def attach(self, rank: Rank) -> None:
        """See Extra. The first and the last stage get parts of one batch, so their owners are neighbours."""
        pairs, rank_of = rank.programs.links, rank.timetable.rank_of
        self._order: CallOrder | None = None  # None: no other rank is linked to this one
        if pairs:
            pairs = [*pairs, (rank_of[0], rank_of[-1])]
            neighbours = {each for pair in pairs if rank.rank in pair for each in pair} - {rank.rank}
            self._order = CallOrder(job_store(rank.key), rank.rank, neighbours, rank.device)

    def begin(self, call: Call) -> None:
        """See Extra."""
        if self._order is not None:
            self._order.begin(call.name or call.kind, call.rows)

    def fail(self, error: BaseException) -> None:
        """A peer may have closed its links because it is in another call: raise that error instead."""
        if self._order is not None and isinstance(error, CommunicationError):
            with suppress(CommunicationError):  # the store may be gone, too
                self._order.check()
